"""Exact sequence lengths of every tenant: what the planner knows about the data."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
from polars.exceptions import ComputeError

from data_prep.errors import DatasetError
from data_prep.files import replace_atomically
from data_prep.prepare import PreparedTenant
from data_prep.token_file import TokenFile

SCHEMA_VERSION = 1
SCHEMA = {"tenant": pl.String, "length": pl.Int64, "count": pl.Int64}


def measure_lengths(prepared: Sequence[PreparedTenant]) -> pl.DataFrame:
    """One row per tenant and length (tokens): [tenant, length, count], tenants as given, lengths rising.

    The longest row held out counts too, once, where no row to train on is as long: the plan must hold it.
    """
    frames = [pl.DataFrame(schema=SCHEMA)]
    for tenant in prepared:
        tokens = TokenFile(tenant.token_path).num_tokens
        if tenant.evaluation_path is not None:
            longest = TokenFile(tenant.evaluation_path).num_tokens.max()
            tokens = np.append(tokens, longest) if longest > tokens.max() else tokens
        lengths, counts = np.unique(tokens, return_counts=True)
        columns = {"tenant": [tenant.tenant] * len(lengths), "length": lengths, "count": counts}
        frames.append(pl.DataFrame(columns, schema=SCHEMA))
    return pl.concat(frames)


def write_histogram(histogram: pl.DataFrame, path: Path) -> None:
    with replace_atomically(path) as temporary:
        histogram.write_parquet(temporary, metadata={"schema_version": str(SCHEMA_VERSION)})


def read_histogram(path: Path) -> pl.DataFrame:
    """Raises DatasetError when the file is missing, damaged or of another schema version."""
    try:
        version = pl.read_parquet_metadata(path).get("schema_version")
        histogram = pl.read_parquet(path)
    except (OSError, ComputeError) as error:
        raise DatasetError(f"histogram {path} cannot be read ({error}); measure the tenants again") from error
    if version != str(SCHEMA_VERSION) or histogram.schema != pl.Schema(SCHEMA):
        raise DatasetError(
            f"histogram {path} has schema version {version}, this program reads {SCHEMA_VERSION}; measure again"
        )
    return histogram


def workload_arrays(histogram: pl.DataFrame, tenant: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """A tenant's lengths (tokens, rising) and how many sequences have each."""
    rows = histogram.filter(pl.col("tenant") == tenant).sort("length")
    if rows.is_empty():
        known = ", ".join(repr(name) for name in histogram["tenant"].unique(maintain_order=True))
        raise DatasetError(f"the histogram has no tenant {tenant!r}, only {known}; measure it again")
    return rows["length"].to_numpy(), rows["count"].to_numpy()
