"""Rows of a Parquet file, one small batch after the other. Dates and other types that JSON lacks stay Python values."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.errors import DatasetError
from data_prep.source import MAX_ROW_BYTES, readable, row_too_large
from data_prep.types import Record, Reject

ROWS_AT_A_TIME = 64  # a batch of the largest rows allowed holds 1 GiB


def read_parquet(path: Path, wanted: set[str] | None) -> Iterator[Record | Reject]:
    """Rows with the `wanted` columns, or with all where that is None or one is missing.

    Raises DatasetError when it is no Parquet file.
    """
    with readable(path):
        path.open("rb").close()  # Arrow's own errors tell less
        try:
            with pq.ParquetFile(path) as file:
                columns = sorted(wanted) if wanted and wanted <= set(file.schema_arrow.names) else None
                first = 1
                for batch in file.iter_batches(ROWS_AT_A_TIME, columns=columns, use_threads=False):
                    yield from _rows(batch, first)
                    first += batch.num_rows
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DatasetError(f"dataset.path: {path} is no sound Parquet file ({error}); write it anew") from error


def _rows(batch: pa.RecordBatch, first: int) -> Iterator[Record | Reject]:
    if batch.nbytes <= MAX_ROW_BYTES:
        num_bytes = batch.nbytes // max(1, batch.num_rows)
        for number, values in enumerate(batch.to_pylist(), first):
            yield Record(number, values, num_bytes)
        return
    for index in range(batch.num_rows):
        row = batch.slice(index, 1)
        if row.nbytes > MAX_ROW_BYTES:
            yield Reject(first + index, row_too_large().reason, "")
        else:
            yield Record(first + index, row.to_pylist()[0], row.nbytes)
