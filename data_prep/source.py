"""Opens a tenant's data file, unpacking .gz, and reads lines of bounded size from it.

A gzip bomb is bounded twice: no row is larger than MAX_ROW_BYTES, and a packed file unpacks to at most
MAX_UNPACKED_BYTES. A file that is not packed may have any size.
"""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from data_prep.errors import DatasetError, RowError

MAX_ROW_BYTES = 16 * 2**20
MAX_UNPACKED_BYTES = 16 * 2**30
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class ByteSource(Protocol):
    """What the readers need of an open file."""

    def read(self, size: int, /) -> bytes: ...

    def readline(self, size: int, /) -> bytes: ...


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Errors of the file system as DatasetError that names field and file."""
    try:
        yield
    except FileNotFoundError as error:
        raise DatasetError(f"dataset.path: {path} does not exist; correct the path") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DatasetError(f"dataset.path: {path} is no complete gzip file ({error}); write it anew") from error
    except OSError as error:
        raise DatasetError(f"dataset.path: {path} cannot be read ({error.strerror}); give a readable file") from error


@contextmanager
def open_data(path: Path) -> Iterator[ByteSource]:
    """The file's bytes, unpacked, after a byte order mark; errors while reading come as DatasetError too."""
    with readable(path), path.open("rb") as file:
        if path.suffix == ".gz":
            with gzip.open(file) as unpacked:
                yield _Limited(_without_mark(unpacked), path)
        else:
            yield _without_mark(file)


def read_line(source: ByteSource) -> bytes:
    """The next line, b"" at the end. A line over MAX_ROW_BYTES is cut just above it, and its tail is skipped."""
    line = source.readline(MAX_ROW_BYTES + 1)
    rest = line
    while len(rest) > MAX_ROW_BYTES and not rest.endswith(b"\n"):
        rest = source.readline(MAX_ROW_BYTES + 1)
    return line


def decode_line(line: bytes) -> str:
    """The line as text; raises RowError when it is too large or not UTF-8."""
    if len(line) > MAX_ROW_BYTES:
        raise row_too_large()
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RowError("not UTF-8", str(error.reason)) from error


def row_too_large() -> RowError:
    return RowError(f"row is larger than {MAX_ROW_BYTES // 2**20} MiB")


class _Limited:
    """A packed file that stops with DatasetError after MAX_UNPACKED_BYTES."""

    def __init__(self, file: ByteSource, path: Path) -> None:
        self._file = file
        self._path = path
        self._left = MAX_UNPACKED_BYTES

    def read(self, size: int, /) -> bytes:
        return self._counted(self._file.read(size))

    def readline(self, size: int, /) -> bytes:
        return self._counted(self._file.readline(size))

    def _counted(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise DatasetError(
                f"dataset.path: {self._path} unpacks to more than {MAX_UNPACKED_BYTES // 2**30} GiB; unpack it yourself"
            )
        return data


def _without_mark(file: BinaryIO | gzip.GzipFile) -> BinaryIO | gzip.GzipFile:
    if file.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
        file.seek(0)
    return file
