"""Rejected rows as Parquet: row, reason, snippet, and in the run folder the file that they come from.

The files hold text of rows, so only their owner may read them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.files import make_private_folder, replace_atomically
from data_prep.names import folder_name
from data_prep.types import Reject

SCHEMA_VERSION = 1
NUM_ROWS_SHOWN = 3
METADATA = {"schema_version": str(SCHEMA_VERSION)}
COLUMNS = [("row", pa.int64()), ("reason", pa.large_string()), ("snippet", pa.large_string())]


class RejectWriter:
    """Appends rejects to an open file and counts their reasons; holds none of them."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer = writer
        self.reasons: Counter[str] = Counter()

    def write(self, rejects: Sequence[Reject]) -> None:
        if rejects:
            self.reasons.update(reject.reason for reject in rejects)
            columns = {name: [getattr(reject, name) for reject in rejects] for name, _ in COLUMNS}
            self._writer.write_table(pa.table(columns, schema=self._writer.schema))


@contextmanager
def open_reject_writer(path: Path) -> Iterator[RejectWriter]:
    """Rejects without their file name, for the cache: equal data may lie in several places."""
    schema = pa.schema(COLUMNS, metadata=METADATA)
    with replace_atomically(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        yield RejectWriter(writer)


def publish_rejects(cached: Path, data_path: Path, run_dir: Path, tenant: str) -> Path:
    """Copies a tenant's rejects into the run folder, with the name of the data file; returns the path."""
    for folder in (run_dir, run_dir / "rejects"):
        make_private_folder(folder)
    path = run_dir / "rejects" / f"{folder_name(tenant)}.parquet"
    rejects = pl.scan_parquet(cached).select(pl.lit(str(data_path)).alias("file"), pl.all())
    with replace_atomically(path) as temporary:
        rejects.sink_parquet(temporary, metadata=METADATA)
    return path


def describe_rejects(path: Path) -> str:
    """Count and first rows of every reason, the most frequent first; no text of rows."""
    reasons = (
        pl.scan_parquet(path)
        .select("row", "reason")
        .group_by("reason")
        .agg(pl.len().alias("count"), pl.col("row").sort().head(NUM_ROWS_SHOWN))
        .sort("count", "reason", descending=[True, False])
        .collect()
    )
    return "; ".join(
        f"{count} x {reason} (first rows: {', '.join(map(str, rows))})" for reason, count, rows in reasons.iter_rows()
    )
