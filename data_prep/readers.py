"""Streams a tenant's JSONL file: each line becomes a row, or a reject that says what is wrong with it.

Blank lines are not rows, but they count as lines. Not covered: other formats, rows made of several columns.
"""

import difflib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from data_prep.config import DatasetConfig
from data_prep.errors import DatasetError, RowError
from data_prep.files import file_sha256
from data_prep.types import ChatRow, Message, PromptRow, Reject

MAX_ROW_BYTES = 16 * 2**20
SNIPPET_CHARACTERS = 200
MAX_COLUMNS_SHOWN = 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_rows(dataset: DatasetConfig) -> Iterator[PromptRow | ChatRow | Reject]:
    """Rows in file order; raises DatasetError for a missing, unreadable or empty file and for an unknown column.

    A column is unknown when no row has it, which is known only at the end: the error comes after the last row.
    """
    unseen = set(_column_fields(dataset))
    found: dict[str, None] = {}
    num_rows = 0
    for number, line in _lines(dataset.path):
        num_rows += 1
        snippet = line[: 4 * SNIPPET_CHARACTERS].decode(errors="replace").strip()[:SNIPPET_CHARACTERS]
        row: PromptRow | ChatRow | Reject
        try:
            values = _parse(line)
            if unseen:
                unseen -= values.keys()
                found.update(dict.fromkeys(values))
            row = _row(values, dataset, number, snippet)
        except RowError as error:
            row = Reject(number, error.reason, f"{error.detail} | {snippet}" if error.detail else snippet)
        yield row
    if num_rows == 0:
        raise DatasetError(f"dataset.path: {dataset.path} holds no rows; give a file with one JSON object per line")
    if unseen and found:
        raise _unknown_column(dataset, min(unseen), sorted(found))


def data_sha256(dataset: DatasetConfig) -> str:
    """SHA-256 of the file's bytes; raises DatasetError as `read_rows` does."""
    with _readable(dataset.path):
        return file_sha256(dataset.path)


def _column_fields(dataset: DatasetConfig) -> dict[str, str]:
    """Column names that the data set must have, with the configuration field that names each."""
    fields = ("prompt_column", "response_column", "messages_column")
    columns = {field: getattr(dataset, field) for field in fields}
    return {column: field for field, column in columns.items() if column is not None}


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """1-based numbers and bytes of the lines that are not blank. A line over the limit is cut just above it."""
    with _readable(path), path.open("rb") as file:
        number = 0
        while line := _read_line(file):
            number += 1
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                yield number, line


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DatasetError(f"dataset.path: {path} does not exist; correct the path") from error
    except OSError as error:
        raise DatasetError(
            f"dataset.path: {path} cannot be read ({error.strerror}); give a readable JSONL file"
        ) from error


def _read_line(file: BinaryIO) -> bytes:
    line = file.readline(MAX_ROW_BYTES + 1)
    rest = line
    while len(rest) > MAX_ROW_BYTES and not rest.endswith(b"\n"):
        rest = file.readline(MAX_ROW_BYTES + 1)
    return line


def _parse(line: bytes) -> dict[str, object]:
    if len(line) > MAX_ROW_BYTES:
        raise RowError(f"row is larger than {MAX_ROW_BYTES // 2**20} MiB")
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise RowError("not UTF-8", str(error.reason)) from error
    except (ValueError, RecursionError) as error:
        raise RowError("malformed JSON", str(error)) from error
    if not isinstance(values, dict):
        raise RowError("not a JSON object")
    if b"\\ud" in line.lower():
        _check_unicode(values)
    return values


def _check_unicode(values: dict[str, object]) -> None:
    """JSON may escape half of a surrogate pair, which no tokenizer accepts."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RowError("not valid Unicode", error.reason) from error


def _row(values: dict[str, object], dataset: DatasetConfig, number: int, snippet: str) -> PromptRow | ChatRow:
    if dataset.messages_column is not None:
        return ChatRow(number, _messages(values, dataset.messages_column), snippet)
    assert dataset.prompt_column is not None
    assert dataset.response_column is not None
    prompt, response = (_text(values, column) for column in (dataset.prompt_column, dataset.response_column))
    if not prompt.strip():
        raise RowError(f"empty prompt (column {dataset.prompt_column!r})")
    if not response.strip():
        raise RowError(f"empty response (column {dataset.response_column!r})")
    return PromptRow(number, prompt, response, snippet)


def _value(values: dict[str, object], column: str) -> object:
    if column not in values:
        raise RowError(f"missing column {column!r}")
    return values[column]


def _text(values: dict[str, object], column: str) -> str:
    value = _value(values, column)
    if not isinstance(value, str):
        raise RowError(f"column {column!r} is not a string")
    return value


def _messages(values: dict[str, object], column: str) -> tuple[Message, ...]:
    value = _value(values, column)
    if not isinstance(value, list) or not value:
        raise RowError(f"column {column!r} is not a list of turns")
    for message in value:
        if not isinstance(message, dict):
            raise RowError(f"a turn in column {column!r} is not a JSON object")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise RowError(f"a turn in column {column!r} has no string {key!r}")
        if message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
            raise RowError(f"empty response (an assistant turn in column {column!r})")
    return tuple(value)


def _unknown_column(dataset: DatasetConfig, column: str, found: list[str]) -> DatasetError:
    nearest = difflib.get_close_matches(column, found, n=1, cutoff=0.0)[0]
    shown = ", ".join(repr(name) for name in found[:MAX_COLUMNS_SHOWN])
    more = f" and {len(found) - MAX_COLUMNS_SHOWN} more" if len(found) > MAX_COLUMNS_SHOWN else ""
    return DatasetError(
        f"dataset.{_column_fields(dataset)[column]}: no row of {dataset.path} has a column {column!r}; "
        f"the nearest is {nearest!r}, the columns are {shown}{more}"
    )
