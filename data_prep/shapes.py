"""A record becomes a row: a prompt with its response, or a conversation in the form that chat templates read.

Chat templates expect tool calls as `{"type": "function", "function": {"name", "arguments"}}` with arguments as an
object, and tools as `{"type": "function", "function": {...}}`; ShareGPT's function calls and OpenAI's arguments in a
string become that. For a template that reads no `tool_calls`, a ShareGPT function call stays what it is: text.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

from data_prep.config import DatasetConfig
from data_prep.errors import RowError
from data_prep.types import ChatRow, Message, PromptRow, Record, Row

# The prompt of Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca), with and without input.
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_RESPONSES = ("output", "response")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
}


def shape_row(record: Record, dataset: DatasetConfig, rendered: Mapping[str, str], reads_tool_calls: bool) -> Row:
    """The row that `dataset` makes of a record; `rendered` are its templates' texts, by key.

    Raises RowError that names the column and what is wrong with it.
    """
    if dataset.is_chat:
        messages = _messages(record.values, dataset, reads_tool_calls)
        return ChatRow(record.number, messages, _tools(record.values, dataset.tools_column))
    if dataset.instruction_column is not None:
        return _alpaca(record, dataset)
    texts = []
    for side, column in (("prompt", dataset.prompt_column), ("response", dataset.response_column)):
        text = rendered[f"{side}_template"] if column is None else _text(record.values, column)
        if not text.strip():
            raise RowError(f"empty {side} ({f'{side}_template' if column is None else f'column {column!r}'})")
        texts.append(text)
    return PromptRow(record.number, *texts)


def is_held_out(row: Row, evaluation_ratio: float) -> bool:
    """Whether the row is for evaluation: by a hash of its text, so that equal rows are on the same side."""
    content = [row.prompt, row.response] if isinstance(row, PromptRow) else [row.messages, row.tools]
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).digest()
    return int.from_bytes(digest) < evaluation_ratio * 2**64


def _value(values: Mapping[str, object], column: str) -> object:
    if column not in values:
        raise RowError(f"missing column {column!r}")
    return values[column]


def _text(values: Mapping[str, object], column: str) -> str:
    value = _value(values, column)
    if not isinstance(value, str):
        raise RowError(f"column {column!r} is not a string")
    return value


def _alpaca(record: Record, dataset: DatasetConfig) -> PromptRow:
    assert dataset.instruction_column is not None
    instruction = _text(record.values, dataset.instruction_column)
    if not instruction.strip():
        raise RowError(f"empty prompt (column {dataset.instruction_column!r})")
    column = dataset.response_column
    if column is None:
        present = [name for name in ALPACA_RESPONSES if name in record.values]
        if len(present) != 1:
            count = "both" if present else "none"
            raise RowError(f"{count} of the columns {' and '.join(map(repr, ALPACA_RESPONSES))}; set response_column")
        column = present[0]
    response = _text(record.values, column)
    if not response.strip():
        raise RowError(f"empty response (column {column!r})")
    added = record.values.get("input")
    if added is not None and not isinstance(added, str):
        raise RowError("column 'input' is not a string")
    template = ALPACA_INPUT if added and added.strip() else ALPACA
    return PromptRow(record.number, template.format(instruction=instruction, input=added), response)


def _messages(values: Mapping[str, object], dataset: DatasetConfig, reads_tool_calls: bool) -> tuple[Message, ...]:
    column = dataset.messages_column or dataset.conversations_column
    assert column is not None
    turns = _value(values, column)
    if not isinstance(turns, list) or not turns:
        raise RowError(f"column {column!r} is not a list of turns")
    read = _openai_turn if dataset.messages_column is not None else _sharegpt_turn
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise RowError(f"a turn in column {column!r} is not a JSON object")
        message = read(turn, column, reads_tool_calls)
        has_text = bool(str(message["content"]).strip()) or "tool_calls" in message
        if message["role"] == "assistant" and not has_text:
            raise RowError(f"empty response (an assistant turn in column {column!r})")
        if message["role"] == "user" and not has_text:
            raise RowError(f"empty prompt (a user turn in column {column!r})")
        messages.append(message)
    return tuple(messages)


def _turn_text(turn: Mapping[str, object], key: str, column: str) -> str:
    value = turn.get(key)
    if not isinstance(value, str):
        raise RowError(f"a turn in column {column!r} has no string {key!r}")
    return value


def _openai_turn(turn: Mapping[str, object], column: str, reads_tool_calls: bool) -> Message:
    message = {key: value for key, value in turn.items() if value is not None}
    calls = message.pop("tool_calls", None)
    if calls:
        if not reads_tool_calls:
            raise RowError(f"a turn in column {column!r} has tool_calls, which the chat template does not read")
        if not isinstance(calls, list):
            raise RowError(f"tool_calls of a turn in column {column!r} are not a list")
        message |= {
            "tool_calls": [_function_call(call, column) for call in calls],
            "content": turn.get("content") or "",
        }
    for key in ("role", "content"):
        _turn_text(message, key, column)
    return message


def _sharegpt_turn(turn: Mapping[str, object], column: str, reads_tool_calls: bool) -> Message:
    speaker, text = (_turn_text(turn, key, column) for key in ("from", "value"))
    if speaker not in SHAREGPT_ROLES:
        raise RowError(f"a turn in column {column!r} is from none of {', '.join(SHAREGPT_ROLES)}", speaker)
    if speaker != "function_call" or not reads_tool_calls:
        return {"role": SHAREGPT_ROLES[speaker], "content": text}
    calls = _parsed(text, f"a function_call in column {column!r}")
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": "", "tool_calls": [_function_call(call, column) for call in calls]}


def _function_call(call: object, column: str) -> Message:
    """One call in the form of chat templates, from that form or from bare `{"name", "arguments"}`."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"a function call in column {column!r} has no name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"arguments of a function call in column {column!r}")
    outer = dict(call) if isinstance(call, dict) and "function" in call else {}
    return outer | {"type": "function", "function": {**function, "arguments": arguments}}


def _tools(values: Mapping[str, object], column: str | None) -> tuple[object, ...] | None:
    tools = values.get(column) if column is not None else None
    if isinstance(tools, str):
        tools = _parsed(tools, f"column {column!r}") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"column {column!r} is not a list of tools")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)


def _parsed(text: str, what: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{what} holds malformed JSON", str(error)) from error
