"""JSONL and CSV: rows that begin at a line, read in a stream. A broken row is a reject; the ones after it are read."""

import csv
import json
from collections.abc import Iterator

from data_prep.errors import DatasetError, RowError
from data_prep.source import MAX_ROW_BYTES, ByteSource, decode_line, read_line, row_too_large
from data_prep.types import Record, Reject

SNIPPET_CHARACTERS = 200


def read_jsonl(source: ByteSource) -> Iterator[Record | Reject]:
    """One JSON object per line; blank lines are not rows, but they count as lines."""
    number = 0
    while line := read_line(source):
        number += 1
        if not line.strip():
            continue
        try:
            yield Record(number, parse_object(decode_line(line)), len(line))
        except RowError as error:
            yield _reject(number, error, line)


def parse_object(text: str) -> dict[str, object]:
    """A JSON object whose strings are valid Unicode; raises RowError."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError("malformed JSON", str(error)) from error
    return check_object(values, text)


def check_object(values: object, text: str) -> dict[str, object]:
    """The parsed `values` of `text`, if they are an object; raises RowError."""
    if not isinstance(values, dict):
        raise RowError("not a JSON object")
    if "\\ud" in text or "\\uD" in text:
        try:  # JSON may escape half of a surrogate pair, which no tokenizer accepts
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RowError("not valid Unicode", error.reason) from error
    return values


def read_csv(source: ByteSource, name: str) -> Iterator[Record | Reject]:
    """Comma-separated rows under a header line; quoted cells may hold line breaks. Every cell is a string.

    Raises DatasetError when the header of the file `name` is unusable.
    """
    csv.field_size_limit(MAX_ROW_BYTES)  # of the whole process, but rows are bounded by `_Lines`
    lines = _Lines(source)
    rows = csv.reader(lines, strict=True)
    header = _header(rows, name)
    while True:
        lines.begin_row()
        try:
            cells = next(rows)
            if not cells:
                continue
            if len(cells) != len(header):
                raise RowError(f"the row has {len(cells)} cells, the header {len(header)}")
            yield Record(lines.first, dict(zip(header, cells, strict=True)), lines.num_bytes)
        except StopIteration:
            return
        except csv.Error as error:
            yield _reject(lines.first, RowError("malformed CSV", str(error)), lines.text)
        except RowError as error:
            yield _reject(lines.first, error, lines.text)


class _Lines:
    """Lines for csv.reader. Counts the bytes of one row, and goes on after an error, as a generator cannot."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._number = 0
        self.begin_row()

    def begin_row(self) -> None:
        self.first = self._number + 1
        self.num_bytes = 0
        self.text = b""

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = read_line(self._source)
        if not line:
            raise StopIteration
        self._number += 1
        self.num_bytes += len(line)
        self.text = self.text or line
        if self.num_bytes > MAX_ROW_BYTES:
            raise row_too_large()
        return decode_line(line)


def _header(rows: Iterator[list[str]], name: str) -> list[str]:
    try:
        header = next(rows, [])
    except (csv.Error, RowError) as error:
        raise DatasetError(f"dataset.path: the header of {name} cannot be read ({error}); correct line 1") from error
    if len(set(header)) != len(header):
        twice = next(column for column in header if header.count(column) > 1)
        raise DatasetError(f"dataset.path: column {twice!r} stands twice in the header of {name}; rename one")
    return header


def _reject(number: int, error: RowError, line: bytes) -> Reject:
    snippet = line[: 4 * SNIPPET_CHARACTERS].decode(errors="replace").strip()[:SNIPPET_CHARACTERS]
    return Reject(number, error.reason, f"{error.detail} | {snippet}" if error.detail else snippet)
