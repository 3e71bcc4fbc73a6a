"""Length models of the paper's data sets, and length histograms from files: workloads without any data.

Table 4 of the paper gives mean, skewness and kurtosis, no standard deviation, so a fit is not unique: there are three
families. `gamma` and `lognormal` are a body of that family with a lognormal tail; `single` is one lognormal with the
table's mean, whose w = exp(sigma^2) solves (w + 2) sqrt(w - 1) = skewness. All are clipped to [16, max_tokens].
"""

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from scipy.optimize import brentq

from planning.errors import InputError
from planning.workload import TenantWorkload

NUM_ROWS = 20_000
MIN_TOKENS = 16


class LengthFamily(StrEnum):
    """Which distribution a length model draws from."""

    GAMMA = "gamma"
    LOGNORMAL = "lognormal"
    SINGLE = "single"


@dataclass(frozen=True, slots=True)
class LengthModel:
    """Sequence lengths of one data set: with probability `tail_weight` from the lognormal tail, else from the body."""

    family: LengthFamily
    mean_tokens: float
    cv: float
    max_tokens: int
    batch_size: int
    tail_weight: float = 0.0
    tail_log_median: float = 0.0
    tail_sigma: float = 0.0

    def draw(self, rng: np.random.Generator, num_rows: int) -> np.ndarray:
        """Lengths (tokens, int64) of `num_rows` rows."""
        if self.family is LengthFamily.GAMMA:
            shape = self.cv**-2
            body = rng.gamma(shape, self.mean_tokens / shape, num_rows)
        else:
            variance = np.log1p(self.cv**2)
            body = np.exp(np.log(self.mean_tokens) - variance / 2 + np.sqrt(variance) * rng.standard_normal(num_rows))
        tail = np.exp(self.tail_log_median + self.tail_sigma * rng.standard_normal(num_rows))
        tokens = np.where(rng.random(num_rows) < self.tail_weight, tail, body)
        return np.asarray(np.ceil(np.clip(tokens, MIN_TOKENS, self.max_tokens)), dtype=np.int64)


def length_model(dataset: str, family: LengthFamily) -> LengthModel:
    """The model of one of the paper's data sets. Raises InputError naming those there are."""
    known = _datasets()
    if dataset not in known:
        raise InputError(f"length model {dataset!r} is not shipped; choose from {', '.join(known)}")
    entry = known[dataset]
    if family is LengthFamily.SINGLE:
        cv = np.sqrt(_lognormal_w(entry["skewness"]) - 1)
        return LengthModel(family, entry["mean_tokens"], float(cv), entry["max_tokens"], entry["batch_size"])
    fit = entry[family.value]
    return LengthModel(
        family,
        fit["body_mean_tokens"],
        fit["body_cv"],
        entry["max_tokens"],
        entry["batch_size"],
        fit["tail_weight"],
        fit["tail_log_median"],
        fit["tail_sigma"],
    )


def dataset_names() -> tuple[str, ...]:
    """The paper's data sets, in the order of its Table 4."""
    return tuple(_datasets())


def modelled_tenant(name: str, model: LengthModel, batch_size: int, seed: int) -> TenantWorkload:
    """A tenant of `NUM_ROWS` seeded rows."""
    lengths, counts = np.unique(model.draw(np.random.default_rng([11, seed]), NUM_ROWS), return_counts=True)
    return TenantWorkload(name, lengths, counts, batch_size)


def tenant_from_histogram(name: str, path: Path, batch_size: int) -> TenantWorkload:
    """A tenant of a histogram file (Parquet or CSV: `length`, `count`). Raises InputError naming file and remedy."""
    try:
        table = pl.read_parquet(path) if path.suffix == ".parquet" else pl.read_csv(path)
        rows = table.select(pl.col("length").cast(pl.Int64), pl.col("count").cast(pl.Int64))
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InputError(f"histogram {path}: {error}; give a Parquet or CSV file with columns length, count") from error
    merged = rows.group_by("length").sum().sort("length")
    try:
        return TenantWorkload(name, merged["length"].to_numpy(), merged["count"].to_numpy(), batch_size)
    except (ValueError, TypeError) as error:
        raise InputError(f"histogram {path}: {error}; correct the file") from error


def _lognormal_w(skewness: float) -> float:
    return float(brentq(lambda w: (w + 2) * np.sqrt(w - 1) - skewness, 1.0, 1e4, xtol=1e-12))


@cache
def _datasets() -> dict[str, dict[str, Any]]:
    text = (resources.files("planning") / "presets" / "lengths.json").read_text(encoding="utf-8")
    datasets: dict[str, dict[str, Any]] = json.loads(text)["datasets"]
    return datasets
