"""Rejected rows as Parquet: row, reason, snippet, and in the run folder the file that they come from.

The files hold text of rows, so only their owner may read them.
"""

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from data_prep.files import make_private_folder, replace_atomically
from data_prep.names import folder_name
from data_prep.types import Reject

SCHEMA_VERSION = 1
NUM_ROWS_SHOWN = 3


def write_rejects(path: Path, rejects: Sequence[Reject]) -> None:
    """Rejects without their file name, for the cache: equal data may lie in several places."""
    columns = {
        "row": [reject.row for reject in rejects],
        "reason": [reject.reason for reject in rejects],
        "snippet": [reject.snippet for reject in rejects],
    }
    _write(path, pl.DataFrame(columns, schema={"row": pl.Int64, "reason": pl.String, "snippet": pl.String}))


def publish_rejects(cached: Path, data_path: Path, run_dir: Path, tenant: str) -> Path:
    """Copies a tenant's rejects into the run folder, with the name of the data file; returns the path."""
    for folder in (run_dir, run_dir / "rejects"):
        make_private_folder(folder)
    path = run_dir / "rejects" / f"{folder_name(tenant)}.parquet"
    frame = pl.read_parquet(cached)
    _write(path, frame.select(pl.lit(str(data_path)).alias("file"), pl.all()))
    return path


def describe_rejects(path: Path) -> str:
    """Count and first rows of every reason, the most frequent first; no text of rows."""
    reasons = (
        pl.read_parquet(path, columns=["row", "reason"])
        .group_by("reason")
        .agg(pl.len().alias("count"), pl.col("row").sort().head(NUM_ROWS_SHOWN))
        .sort("count", "reason", descending=[True, False])
    )
    return "; ".join(
        f"{count} x {reason} (first rows: {', '.join(map(str, rows))})" for reason, count, rows in reasons.iter_rows()
    )


def _write(path: Path, frame: pl.DataFrame) -> None:
    with replace_atomically(path) as temporary:
        frame.write_parquet(temporary, metadata={"schema_version": str(SCHEMA_VERSION)})
