import json

import pytest

from data_prep.config import DatasetConfig
from data_prep.errors import DatasetError
from data_prep.readers import MAX_ROW_BYTES, read_rows
from data_prep.types import ChatRow, PromptRow, Reject

GOOD = {"question": "Why?", "answer": "Because."}


def plain(path):
    return DatasetConfig(path=path, prompt_column="question", response_column="answer")


def chat(path):
    return DatasetConfig(path=path, messages_column="messages")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question": "secret', "malformed JSON"),
        ("[" * 100_000, "malformed JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"question": "secret"}', "missing column 'answer'"),
        ('{"question": "secret", "answer": 3}', "column 'answer' is not a string"),
        ('{"question": "secret", "answer": null}', "column 'answer' is not a string"),
        ('{"question": "secret", "answer": ""}', "empty response (column 'answer')"),
        ('{"question": "secret", "answer": " \\n"}', "empty response (column 'answer')"),
        ('{"question": "", "answer": "secret"}', "empty prompt (column 'question')"),
        ('{"question": "\\ud83d", "answer": "secret"}', "not valid Unicode"),
    ],
)
def test_one_bad_line_is_rejected_with_its_line_number_and_the_others_are_read(jsonl, line, reason):
    path = jsonl([GOOD, "", line, GOOD])
    first, bad, last = read_rows(plain(path))
    assert (first.number, last.number) == (1, 4)
    assert isinstance(bad, Reject)
    assert (bad.row, bad.reason) == (3, reason)
    assert line[:10] in bad.snippet
    assert len(bad.snippet) < 400


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("hi", "column 'messages' is not a list of turns"),
        ([], "column 'messages' is not a list of turns"),
        (["hi"], "a turn in column 'messages' is not a JSON object"),
        ([{"role": "user"}], "a turn in column 'messages' has no string 'content'"),
        ([{"content": "hi"}], "a turn in column 'messages' has no string 'role'"),
        ([{"role": "assistant", "content": " "}], "empty response (an assistant turn in column 'messages')"),
    ],
)
def test_a_conversation_of_the_wrong_shape_is_rejected_with_a_reason(jsonl, messages, reason):
    (row,) = read_rows(chat(jsonl([{"messages": messages}])))
    assert isinstance(row, Reject)
    assert row.reason == reason


def test_good_rows_keep_their_text_exactly(jsonl):
    values = {"question": " Où\u2028est\t\U0001f600? ", "answer": "\n Là "}
    (row,) = read_rows(plain(jsonl([values])))
    assert isinstance(row, PromptRow)
    assert (row.prompt, row.response) == (values["question"], values["answer"])
    messages = [{"role": "user", "content": "a", "name": "x"}, {"role": "assistant", "content": "b"}]
    (row,) = read_rows(chat(jsonl([{"messages": messages}])))
    assert isinstance(row, ChatRow)
    assert list(row.messages) == messages


def test_windows_files_with_byte_order_mark_are_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n" + json.dumps(GOOD).encode())
    assert [row.number for row in read_rows(plain(path)) if isinstance(row, PromptRow)] == [1, 2]


def test_a_line_that_is_not_utf8_is_rejected_alone(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "\xff"}\n' + json.dumps(GOOD).encode())
    bad, good = read_rows(plain(path))
    assert bad.reason == "not UTF-8"
    assert good.number == 2


def test_a_giant_line_is_rejected_without_its_tail_becoming_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    giant = json.dumps({**GOOD, "answer": "x" * (2 * MAX_ROW_BYTES)})
    path.write_text(giant + "\n" + json.dumps(GOOD) + "\n")
    bad, good = read_rows(plain(path))
    assert bad.reason == "row is larger than 16 MiB"
    assert good.number == 2


def test_a_column_that_no_row_has_is_an_error_with_the_nearest_column(jsonl):
    path = jsonl(["{broken", {"questions": "a", "answer": "b", "id": 1}])
    with pytest.raises(DatasetError) as caught:
        list(read_rows(plain(path)))
    message = str(caught.value)
    assert "dataset.prompt_column" in message
    assert "'question'" in message
    assert "nearest is 'questions'" in message
    assert "'answer', 'id', 'questions'" in message


def test_a_column_that_one_row_has_is_known(jsonl):
    rows = list(read_rows(plain(jsonl([{"question": "a"}, GOOD]))))
    assert [type(row) for row in rows] == [Reject, PromptRow]


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_an_error_that_names_field_and_file(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(DatasetError, match=r"dataset\.path: .*rows\.jsonl holds no rows; give"):
        list(read_rows(plain(path)))


def test_a_missing_or_unreadable_file_is_an_error_that_names_field_and_file(tmp_path):
    with pytest.raises(DatasetError, match=r"dataset\.path: .*none\.jsonl does not exist"):
        list(read_rows(plain(tmp_path / "none.jsonl")))
    with pytest.raises(DatasetError, match=r"dataset\.path: .* cannot be read \(Is a directory\)"):
        list(read_rows(plain(tmp_path)))
