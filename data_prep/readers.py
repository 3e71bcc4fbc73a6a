"""A tenant's file as records in file order, whatever its format, and the columns that it turns out to have."""

import difflib
from collections.abc import Iterator
from pathlib import Path

from data_prep.config import DataFormat, DatasetConfig
from data_prep.errors import DatasetError
from data_prep.files import file_sha256
from data_prep.json_documents import read_array, read_by_id
from data_prep.line_formats import read_csv, read_jsonl
from data_prep.parquet import read_parquet
from data_prep.source import open_data, readable
from data_prep.types import Record, Reject

MAX_COLUMNS_SHOWN = 20
MAX_COLUMNS_NOTED = 1000


class RecordReader:
    """Iterating gives each row as a Record, or as a Reject where the file is broken.

    Raises DatasetError for a missing, unreadable or empty file, and for one that is not of the format given.
    """

    def __init__(self, dataset: DatasetConfig) -> None:
        self._dataset = dataset
        self._unseen = set(dataset.required_columns())
        self._found: dict[str, None] = {}

    def __iter__(self) -> Iterator[Record | Reject]:
        is_empty = True
        for item in self._read():
            is_empty = False
            if self._unseen and isinstance(item, Record):
                self._unseen -= item.values.keys()
                if len(self._found) < MAX_COLUMNS_NOTED:
                    self._found.update(dict.fromkeys(item.values))
            yield item
        if is_empty:
            raise DatasetError(f"dataset.path: {self._dataset.path} holds no rows; give a file with at least one")

    def check_columns(self, num_kept: int) -> None:
        """Raises DatasetError for a column that no row had, which is known only after the last row.

        A field of a template counts only if no row was kept, because a template may do without it.
        """
        required = self._dataset.required_columns()
        unseen = {name for name in self._unseen if num_kept == 0 or required[name] not in self._dataset.templates}
        if not unseen or not self._found:
            return
        column, found = min(unseen), sorted(self._found)
        nearest = difflib.get_close_matches(column, found, n=1, cutoff=0.0)[0]
        shown = ", ".join(repr(name) for name in found[:MAX_COLUMNS_SHOWN])
        more = f" and {len(found) - MAX_COLUMNS_SHOWN} more" if len(found) > MAX_COLUMNS_SHOWN else ""
        raise DatasetError(
            f"dataset.{required[column]}: no row of {self._dataset.path} has a column "
            f"{column!r}; the nearest is {nearest!r}, the columns are {shown}{more}"
        )

    def _read(self) -> Iterator[Record | Reject]:
        path, name = self._dataset.path, str(self._dataset.path)
        if self._dataset.format is DataFormat.PARQUET:
            yield from read_parquet(path, _wanted_columns(self._dataset))
            return
        with open_data(path) as source:
            match self._dataset.format:
                case DataFormat.JSONL:
                    yield from read_jsonl(source)
                case DataFormat.JSON:
                    yield from read_array(source, name)
                case DataFormat.JSON_BY_ID:
                    yield from read_by_id(source, name)
                case DataFormat.CSV:
                    yield from read_csv(source, name)


def data_sha256(path: Path) -> str:
    """SHA-256 of the file's bytes, as they are; raises DatasetError as reading does."""
    with readable(path):
        return file_sha256(path)


def _wanted_columns(dataset: DatasetConfig) -> set[str] | None:
    """Columns that a row is made of; None where that is not known beforehand (templates, Alpaca)."""
    if dataset.templates or dataset.instruction_column is not None:
        return None
    return set(dataset.required_columns())
