import csv
import gzip
import io
import json

import polars as pl
import pytest
from pydantic import ValidationError

from data_prep import json_documents, source
from data_prep.config import DatasetConfig
from data_prep.errors import DatasetError
from data_prep.readers import RecordReader
from data_prep.source import MAX_ROW_BYTES
from data_prep.types import Record, Reject

GOOD = {"question": "Why?", "answer": "Because."}
ROWS = [
    {"question": "Why\n\u2028 \U0001f600?", "answer": ' "So", he said,\nand left. '},
    {"question": "[{,", "answer": "}\\"},
    {"question": "Où?", "answer": "Là\r\n"},
]


def plain(path, **changes):
    return DatasetConfig(path=path, prompt_column="question", response_column="answer", **changes)


def read(path, **changes):
    return list(RecordReader(plain(path, **changes)))


def as_csv(rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


TEXTS = {
    "jsonl": lambda rows: "".join(json.dumps(row) + "\n" for row in rows),
    "json": lambda rows: json.dumps(rows, ensure_ascii=False, indent=2),
    "json_by_id": lambda rows: json.dumps({f"{i}": row for i, row in enumerate(rows)}, indent=1),
    "csv": as_csv,
}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", list(TEXTS))
def test_every_text_format_gives_the_same_rows_packed_or_not_with_a_byte_order_mark_or_not(
    tmp_path, name, packed, mark
):
    data = mark + TEXTS[name](ROWS).encode()
    path = tmp_path / ("rows.gz" if packed else "rows")
    path.write_bytes(gzip.compress(data) if packed else data)
    assert [record.values for record in read(path, format=name)] == ROWS


def test_parquet_gives_the_same_rows_numbered_from_1(tmp_path):
    path = tmp_path / "rows.parquet"
    pl.DataFrame(ROWS * 100).write_parquet(path, row_group_size=70)
    records = read(path, format="parquet")
    assert [record.values for record in records] == ROWS * 100
    assert [record.number for record in records] == list(range(1, 301))


def test_json_documents_larger_than_the_reading_window_are_read_to_the_last_row(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    for size in (1, 2, 7, 50):
        monkeypatch.setattr(json_documents, "READ_BYTES", size)
        for name in ("json", "json_by_id"):
            path.write_text(TEXTS[name](ROWS))
            assert [record.values for record in read(path, format=name)] == ROWS


def test_rows_of_a_csv_file_are_numbered_by_the_line_they_begin_at(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('question,answer\n"a\nb\nc",d\n\n"e",f\n')
    assert [record.number for record in read(path, format="csv")] == [2, 6]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("a", "the row has 1 cells, the header 2"),
        ("a,b,c", "the row has 3 cells, the header 2"),
        ('"a"b,c', "malformed CSV"),
    ],
)
def test_a_broken_csv_row_is_rejected_with_its_line_and_the_others_are_read(tmp_path, line, reason):
    path = tmp_path / "rows.csv"
    path.write_text(f"question,answer\nx,y\n{line}\nv,w\n")
    first, bad, last = read(path, format="csv")
    assert (bad.row, bad.reason) == (3, reason)
    assert line in bad.snippet
    assert (first.values["answer"], last.number, last.values["answer"]) == ("y", 4, "w")


def test_a_csv_quote_that_never_closes_is_rejected_with_the_line_where_it_opens(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('question,answer\nx,y\n"a,b\nc,d\n')
    assert [getattr(item, "row", None) for item in read(path, format="csv")] == [None, 3]
    path.write_text('question,answer\n"a,b\n' + f"{'x' * 1000}\n" * (MAX_ROW_BYTES // 1000))
    assert read(path, format="csv")[0] == Reject(2, "row is larger than 16 MiB", '"a,b')


def test_a_csv_line_that_is_not_utf8_is_rejected_alone(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b"question,answer\n\xff,y\nx,y\n")
    bad, good = read(path, format="csv")
    assert (bad.row, bad.reason, good.number) == (2, "not UTF-8", 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a,b,a\n1,2,3\n", "column 'a' stands twice"), (b"\xff,b\n", "header of .* cannot be read .* correct line 1")],
)
def test_a_csv_header_that_cannot_be_used_is_an_error(tmp_path, content, message):
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        read(path, format="csv")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("json", '[{"a": 1},\n {"a": 2}\n {"a": 3}]', r"line 3 column 2: expected a comma or '\]' after row 2"),
        ("json", '[{"a": 1},\n {"a": oops}]', r"line 2 column 8: row 2 is malformed JSON: Expecting value"),
        ("json", '[{"a": 1}', r"line 1 column 10: expected a comma"),
        ("json", '[{"a": "x', r"line 1 column 8: row 1 is malformed JSON: Unterminated string"),
        ("json", '[{"a": 1}] x', r"line 1 column 12: expected the end of the file"),
        ("json", '{"a": 1}\n{"a": 2}\n', r"line 1 column 1: expected a JSON array of objects"),
        ("json_by_id", '[{"a": 1}]', r"expected a JSON object of objects"),
        ("json_by_id", '{"x" {"a": 1}}', r"line 1 column 6: expected a colon after an id"),
        ("json", '[{"a": ' + "[" * 100_000, "row 1 is nested too deeply"),
    ],
)
def test_a_malformed_json_document_is_an_error_that_names_line_column_and_row(tmp_path, name, text, message):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(DatasetError, match=rf"dataset\.path: .*rows\.json, .*{message}"):
        read(path, format=name)


def test_a_malformed_json_document_is_placed_right_when_it_is_read_in_small_pieces(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    path.write_text('[{"a": 1},\n\n {"a": oops}]')
    for size in range(1, 12):
        monkeypatch.setattr(json_documents, "READ_BYTES", size)
        with pytest.raises(DatasetError, match="line 3 column 8: row 2 is malformed"):
            read(path, format="json")


@pytest.mark.parametrize("size", [1, 3, 2**18])
def test_elements_of_a_json_array_that_are_no_objects_are_rejected_alone(tmp_path, monkeypatch, size):
    monkeypatch.setattr(json_documents, "READ_BYTES", size)
    path = tmp_path / "rows.json"
    path.write_text('[12, {"question": "a", "answer": "b"}, "x", null]')
    items = read(path, format="json")
    assert [item.row for item in items if isinstance(item, Reject)] == [1, 3, 4]
    assert {item.reason for item in items if isinstance(item, Reject)} == {"not a JSON object"}


def test_a_json_row_over_the_size_limit_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([GOOD, {"question": "x" * (MAX_ROW_BYTES + 10)}]))
    with pytest.raises(DatasetError, match=r"row 2 is .*larger than 16 MiB"):
        read(path, format="json")


def test_a_parquet_row_over_the_size_limit_is_rejected_alone(tmp_path):
    path = tmp_path / "rows.parquet"
    pl.DataFrame([GOOD, {**GOOD, "answer": "x" * (MAX_ROW_BYTES + 10)}, GOOD]).write_parquet(path)
    first, bad, last = read(path, format="parquet")
    assert (bad.row, bad.reason) == (2, "row is larger than 16 MiB")
    assert (first.number, last.number) == (1, 3)


@pytest.mark.parametrize("damage", [b"rubbish", b"PAR1rubbishPAR1", b""])
def test_a_damaged_parquet_file_is_an_error(tmp_path, damage):
    path = tmp_path / "rows.parquet"
    path.write_bytes(damage)
    with pytest.raises(DatasetError, match=r"rows\.parquet is no sound Parquet file .*write it anew"):
        read(path, format="parquet")


def test_a_damaged_parquet_column_is_an_error_not_a_crash(tmp_path):
    path = tmp_path / "rows.parquet"
    pl.DataFrame([{"question": f"{i} why", "answer": f"{i}"} for i in range(5000)]).write_parquet(path)
    data = bytearray(path.read_bytes())
    data[200:3000] = bytes(2800)
    path.write_bytes(data)
    with pytest.raises(DatasetError, match="no sound Parquet file"):
        read(path, format="parquet")


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: data[:40] + b"xxxx" + data[44:], lambda _: b"x"]
)
def test_a_damaged_gzip_file_is_an_error(tmp_path, damage):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(damage(gzip.compress(TEXTS["jsonl"]([{**GOOD, "id": i} for i in range(99)]).encode())))
    with pytest.raises(DatasetError, match=r"rows\.jsonl\.gz is no complete gzip file"):
        read(path)


def test_a_gzip_bomb_is_stopped_at_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "MAX_UNPACKED_BYTES", 2**20)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(GOOD) + "\n").encode() * 100_000))
    with pytest.raises(DatasetError, match=r"unpacks to more than .* unpack it yourself"):
        read(path)


@pytest.mark.parametrize(
    ("name", "form", "message"),
    [
        ("rows.csv", "jsonl", "set format: csv"),
        ("rows.csv.gz", "jsonl", "set format: csv"),
        ("rows.jsonl", "parquet", "set format: jsonl"),
        ("rows.parquet.gz", "parquet", "unpack the file"),
    ],
)
def test_a_format_that_contradicts_the_files_name_is_refused_with_the_remedy(name, form, message):
    with pytest.raises(ValidationError, match=message):
        plain(name, format=form)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question": "secret', "malformed JSON"),
        ("[" * 100_000, "malformed JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"question": "\\ud83d", "answer": "secret"}', "not valid Unicode"),
    ],
)
def test_one_bad_line_is_rejected_with_its_line_number_and_the_others_are_read(jsonl, line, reason):
    first, bad, last = read(jsonl([GOOD, "", line, GOOD]))
    assert (first.number, last.number) == (1, 4)
    assert isinstance(bad, Reject)
    assert (bad.row, bad.reason) == (3, reason)
    assert line[:10] in bad.snippet
    assert len(bad.snippet) < 400


def test_windows_files_are_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\r\n" + json.dumps(GOOD).encode())
    assert [row.number for row in read(path) if isinstance(row, Record)] == [1, 2]


def test_a_line_that_is_not_utf8_is_rejected_alone(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "\xff"}\n' + json.dumps(GOOD).encode())
    bad, good = read(path)
    assert bad.reason == "not UTF-8"
    assert good.number == 2


def test_a_giant_line_is_rejected_without_its_tail_becoming_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    giant = json.dumps({**GOOD, "answer": "x" * (2 * MAX_ROW_BYTES)})
    path.write_text(giant + "\n" + json.dumps(GOOD) + "\n")
    bad, good = read(path)
    assert bad.reason == "row is larger than 16 MiB"
    assert good.number == 2


def test_a_column_that_no_row_has_is_an_error_with_the_nearest_column(jsonl):
    reader = RecordReader(plain(jsonl(["{broken", {"questions": "a", "answer": "b", "id": 1}])))
    list(reader)
    with pytest.raises(DatasetError) as caught:
        reader.check_columns(num_kept=0)
    message = str(caught.value)
    assert "dataset.prompt_column" in message
    assert "'question'" in message
    assert "nearest is 'questions'" in message
    assert "'answer', 'id', 'questions'" in message


def test_a_column_that_one_row_has_is_known(jsonl):
    reader = RecordReader(plain(jsonl([{"question": "a"}, GOOD])))
    assert len(list(reader)) == 2
    reader.check_columns(num_kept=1)


@pytest.mark.parametrize(
    ("form", "content"),
    [
        ("jsonl", ""),
        ("jsonl", "\n \n"),
        ("json", "[ ]"),
        ("json_by_id", "{}"),
        ("csv", ""),
        ("csv", "question,answer\n"),
    ],
)
def test_an_empty_file_is_an_error_that_names_field_and_file(tmp_path, form, content):
    path = tmp_path / "rows.txt"
    path.write_text(content)
    with pytest.raises(DatasetError, match=r"dataset\.path: .*rows\.txt holds no rows; give"):
        read(path, format=form)


@pytest.mark.parametrize("form", ["jsonl", "json", "json_by_id", "csv", "parquet"])
def test_a_missing_or_unreadable_file_is_an_error_that_names_field_and_file(tmp_path, form):
    with pytest.raises(DatasetError, match=r"dataset\.path: .*none does not exist"):
        read(tmp_path / "none", format=form)
    with pytest.raises(DatasetError, match=r"dataset\.path: .* cannot be read \("):
        read(tmp_path, format=form)
