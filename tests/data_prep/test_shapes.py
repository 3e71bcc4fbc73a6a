import json

import pytest
from pydantic import ValidationError

from data_prep.config import DatasetConfig
from data_prep.errors import RowError
from data_prep.shapes import is_held_out, shape_row
from data_prep.types import ChatRow, PromptRow, Record

PLAIN = {"prompt_column": "question", "response_column": "answer"}
ALPACA = {"instruction_column": "instruction"}
CHAT = {"messages_column": "messages"}
SHAREGPT = {"conversations_column": "conversations", "tools_column": "tools"}
CALL = {"name": "area", "arguments": {"sides": [5, 3]}}


def shape(values, reads_tool_calls=False, **dataset):
    return shape_row(Record(3, values, 0), DatasetConfig(path="rows", **dataset), {}, reads_tool_calls)


def test_a_prompt_row_keeps_its_text_exactly():
    values = {"question": " Où\u2028est\t\U0001f600? ", "answer": "\n Là "}
    assert shape(values, **PLAIN) == PromptRow(3, values["question"], values["answer"])


def test_an_alpaca_row_has_the_published_prompt_with_and_without_input():
    head = "Below is an instruction that describes a task"
    row = shape({"instruction": "Add.", "input": "1 {2}", "response": "3"}, **ALPACA)
    assert row.prompt.startswith(f"{head}, paired with an input")
    assert row.prompt.endswith("### Instruction:\nAdd.\n\n### Input:\n1 {2}\n\n### Response:\n")
    for nothing in ({}, {"input": ""}, {"input": None}, {"input": " "}):
        row = shape({"instruction": "Sing.", "output": "La.", **nothing}, **ALPACA)
        assert row.prompt.startswith(f"{head}. Write")
        assert row.prompt.endswith("completes the request.\n\n### Instruction:\nSing.\n\n### Response:\n")
        assert row.response == "La."


def test_the_alpaca_response_column_can_be_named():
    values = {"instruction": "Sing.", "output": "La.", "response": "No.", "text": "Lo."}
    assert shape(values, **ALPACA, response_column="text").response == "Lo."


def test_a_chat_row_keeps_its_turns_and_leaves_out_what_is_null():
    messages = [{"role": "user", "content": "a", "name": "x"}, {"role": "assistant", "content": "b"}]
    nulls = [{**message, "tool_calls": None} for message in messages]
    assert shape({"messages": nulls}, **CHAT) == ChatRow(3, tuple(messages))


def test_sharegpt_turns_become_roles_and_function_calls_become_tool_calls():
    speakers = ["system", "human", "function_call", "observation", "gpt"]
    turns = [{"from": s, "value": json.dumps(CALL) if s == "function_call" else s} for s in speakers]
    row = shape({"conversations": turns, "tools": json.dumps([{"name": "area"}])}, reads_tool_calls=True, **SHAREGPT)
    assert [message["role"] for message in row.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert row.messages[2]["content"] == ""
    assert row.messages[2]["tool_calls"] == [{"type": "function", "function": CALL}]
    assert row.tools == ({"type": "function", "function": {"name": "area"}},)


def test_a_function_call_stays_text_for_a_template_that_reads_no_tool_calls():
    turns = [{"from": "human", "value": "a"}, {"from": "function_call", "value": json.dumps(CALL)}]
    row = shape({"conversations": turns, "tools": "[]"}, **SHAREGPT)
    assert row.messages[1] == {"role": "assistant", "content": json.dumps(CALL)}
    assert row.tools is None


def test_openai_tool_calls_get_their_arguments_as_an_object():
    call = {"id": "c1", "type": "function", "function": {"name": "area", "arguments": json.dumps(CALL["arguments"])}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    row = shape({"messages": turns}, reads_tool_calls=True, **CHAT)
    assert row.messages[1]["tool_calls"] == [{"id": "c1", "type": "function", "function": CALL}]
    assert row.messages[1]["content"] == ""
    with pytest.raises(RowError, match="tool_calls, which the chat template does not read"):
        shape({"messages": turns}, **CHAT)


@pytest.mark.parametrize(
    ("dataset", "values", "reason"),
    [
        (PLAIN, {"question": "secret"}, "missing column 'answer'"),
        (PLAIN, {"question": "secret", "answer": 3}, "column 'answer' is not a string"),
        (PLAIN, {"question": "secret", "answer": None}, "column 'answer' is not a string"),
        (PLAIN, {"question": ["secret"], "answer": "a"}, "column 'question' is not a string"),
        (PLAIN, {"question": "secret", "answer": ""}, "empty response (column 'answer')"),
        (PLAIN, {"question": "secret", "answer": " \n"}, "empty response (column 'answer')"),
        (PLAIN, {"question": "", "answer": "secret"}, "empty prompt (column 'question')"),
        (ALPACA, {"instruction": " ", "output": "b"}, "empty prompt (column 'instruction')"),
        (ALPACA, {"instruction": "a", "output": ""}, "empty response (column 'output')"),
        (ALPACA, {"instruction": "a"}, "none of the columns 'output' and 'response'; set response_column"),
        (
            ALPACA,
            {"instruction": "a", "output": "b", "response": "c"},
            "both of the columns 'output' and 'response'; set response_column",
        ),
        (ALPACA, {"instruction": "a", "output": "b", "input": 3}, "column 'input' is not a string"),
        (CHAT, {"messages": "hi"}, "column 'messages' is not a list of turns"),
        (CHAT, {"messages": []}, "column 'messages' is not a list of turns"),
        (CHAT, {"messages": ["hi"]}, "a turn in column 'messages' is not a JSON object"),
        (CHAT, {"messages": [{"role": "user"}]}, "a turn in column 'messages' has no string 'content'"),
        (CHAT, {"messages": [{"content": "hi"}]}, "a turn in column 'messages' has no string 'role'"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": " "}]},
            "empty response (an assistant turn in column 'messages')",
        ),
        (CHAT, {"messages": [{"role": "user", "content": ""}]}, "empty prompt (a user turn in column 'messages')"),
        (
            SHAREGPT,
            {"conversations": [{"from": "bot", "value": "a"}]},
            "a turn in column 'conversations' is from none of human, gpt, system, function_call, observation",
        ),
        (SHAREGPT, {"conversations": [{"from": "gpt"}]}, "a turn in column 'conversations' has no string 'value'"),
        (
            SHAREGPT,
            {"conversations": [{"from": "function_call", "value": "area(5, 3)"}]},
            "a function_call in column 'conversations' holds malformed JSON",
        ),
        (
            SHAREGPT,
            {"conversations": [{"from": "function_call", "value": "[3]"}]},
            "a function call in column 'conversations' has no name",
        ),
        (
            SHAREGPT,
            {"conversations": [{"from": "gpt", "value": "a"}], "tools": "[{"},
            "column 'tools' holds malformed JSON",
        ),
        (
            SHAREGPT,
            {"conversations": [{"from": "gpt", "value": "a"}], "tools": "3"},
            "column 'tools' is not a list of tools",
        ),
    ],
)
def test_a_row_of_the_wrong_shape_is_refused_with_its_column_and_without_its_text(dataset, values, reason):
    with pytest.raises(RowError) as caught:
        shape(values, reads_tool_calls=True, **dataset)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({}, "give one of messages_column, .*not none of them"),
        (CHAT | ALPACA, "not messages_column and instruction_column"),
        (CHAT | PLAIN, r"not messages_column and prompt_column \(or prompt_template\)"),
        ({"prompt_column": "a"}, "give both a prompt and a response"),
        ({"response_column": "a"}, "give both a prompt and a response"),
        (PLAIN | {"prompt_template": "x"}, "give either prompt_column or prompt_template"),
        (PLAIN | {"tools_column": "tools"}, "tools_column belongs to messages_column or conversations_column"),
        (ALPACA | {"response_template": "x"}, "takes a response_column, not a response_template"),
        ({"prompt_template": "{% if %}", "response_column": "a"}, "line 1 of the template: .*; correct it"),
        ({"prompt_template": "x" * 70_000, "response_column": "a"}, "at most 65536 characters"),
    ],
)
def test_a_data_set_is_read_in_exactly_one_way(dataset, message):
    with pytest.raises(ValidationError, match=message):
        DatasetConfig(path="rows", **dataset)


def test_held_out_rows_are_the_part_asked_for_and_depend_on_nothing_but_their_text():
    rows = [PromptRow(i, f"question {i}", f"answer {i}") for i in range(4000)]
    held_out = {row.prompt for row in rows if is_held_out(row, 0.1)}
    # Standard deviation of the count is sqrt(4000 * 0.1 * 0.9) = 19; five of them.
    assert abs(len(held_out) - 400) < 95
    assert held_out == {row.prompt for row in rows if is_held_out(PromptRow(0, row.prompt, row.response), 0.1)}
    assert held_out < {row.prompt for row in rows if is_held_out(row, 0.2)}
    chat = ChatRow(1, ({"role": "user", "content": "a"},))
    assert is_held_out(chat, 0.999999)
    assert not is_held_out(chat, 0.0)
