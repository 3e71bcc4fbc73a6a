"""A JSON file that is one array of rows, or one object of rows keyed by id, read without holding it as a whole.

Text is read piece by piece and decoded row by row; a row that does not end within MAX_ROW_BYTES, or is not JSON, makes
the rest of the file unreadable, so it is an error, with its place.
"""

import codecs
import json
import re
from collections.abc import Iterator
from itertools import count

from data_prep.errors import DatasetError, RowError
from data_prep.line_formats import SNIPPET_CHARACTERS, check_object
from data_prep.source import MAX_ROW_BYTES, ByteSource
from data_prep.types import Record, Reject

READ_BYTES = 2**18

_BLANK = re.compile(r"[ \t\r\n]*")


def read_array(source: ByteSource, name: str) -> Iterator[Record | Reject]:
    """Rows of `[{...}, ...]`; raises DatasetError when the file `name` is something else."""
    text = _Text(source, name)
    text.expect("[", "a JSON array of objects (format: json)")
    yield from _rows(text, "]", keyed=False)


def read_by_id(source: ByteSource, name: str) -> Iterator[Record | Reject]:
    """Rows of `{"id": {...}, ...}`, without their ids; raises DatasetError when the file `name` is something else."""
    text = _Text(source, name)
    text.expect("{", "a JSON object of objects (format: json_by_id)")
    yield from _rows(text, "}", keyed=True)


def _rows(text: "_Text", closing: str, keyed: bool) -> Iterator[Record | Reject]:
    for number in count(1):
        if text.at(closing):
            break
        if number > 1:
            text.expect(",", f"a comma or {closing!r} after row {number - 1}")
        if keyed:
            text.value(number)
            text.expect(":", "a colon after an id")
        values, written = text.value(number)
        try:
            yield Record(number, check_object(values, written), len(written))
        except RowError as error:
            yield Reject(number, error.reason, written[:SNIPPET_CHARACTERS])
    text.expect(closing, closing)
    text.expect("", "the end of the file")


class _Text:
    """A window on the file's text: what is decoded leaves it on the left, what is read enters on the right."""

    def __init__(self, source: ByteSource, name: str) -> None:
        self._source = source
        self._name = name
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder()
        self._window = ""
        self._position = 0
        self._is_complete = False
        self._line = 1
        self._column = 1

    def at(self, token: str) -> bool:
        """Whether `token` (one character) is what comes next after blanks."""
        self._skip_blanks()
        return self._window.startswith(token, self._position)

    def expect(self, token: str, what: str) -> None:
        """Steps over `token`, or with "" insists on the end; `what` names it in the error."""
        if not self.at(token) or (token == "" and self._position < len(self._window)):
            raise self._error(f"expected {what}")
        self._position += len(token)

    def value(self, number: int) -> tuple[object, str]:
        """The JSON value that comes next, and its text; `number` is the row that it belongs to."""
        self._skip_blanks()
        while True:
            try:
                value, end = self._json.raw_decode(self._window, self._position)
            except RecursionError as error:
                raise self._error(f"row {number} is nested too deeply") from error
            except json.JSONDecodeError as error:
                if self._is_complete or len(self._window) - self._position > MAX_ROW_BYTES:
                    raise self._bad_row(number, error) from error
            else:
                if end - self._position > MAX_ROW_BYTES:
                    raise self._error(f"row {number} is larger than {MAX_ROW_BYTES // 2**20} MiB")
                if end < len(self._window) or self._is_complete:  # else a number may go on
                    written = self._window[self._position : end]
                    self._position = end
                    return value, written
            # Doubling, so that a row is decoded anew only as often as its length doubles.
            self._read(max(READ_BYTES, len(self._window) - self._position))

    def _skip_blanks(self) -> None:
        while True:
            match = _BLANK.match(self._window, self._position)
            self._position = match.end() if match else self._position
            if self._position < len(self._window) or self._is_complete:
                return
            self._read(READ_BYTES)

    def _read(self, num_bytes: int) -> None:
        data = self._source.read(num_bytes)
        try:
            decoded = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise self._error(f"not UTF-8 ({error.reason}) after this place") from error
        self._is_complete = not data
        self._line, self._column = self._place(self._position)
        self._window = self._window[self._position :] + decoded
        self._position = 0

    def _place(self, position: int) -> tuple[int, int]:
        newlines = self._window.count("\n", 0, position)
        if newlines == 0:
            return self._line, self._column + position
        return self._line + newlines, position - self._window.rindex("\n", 0, position)

    def _bad_row(self, number: int, error: json.JSONDecodeError) -> DatasetError:
        if not self._is_complete:
            return self._error(f"row {number} is malformed, or larger than {MAX_ROW_BYTES // 2**20} MiB")
        self._position = min(error.pos, len(self._window))
        return self._error(f"row {number} is malformed JSON: {error.msg}")

    def _error(self, what: str) -> DatasetError:
        line, column = self._place(self._position)
        return DatasetError(f"dataset.path: {self._name}, line {line} column {column}: {what}; correct the file")
