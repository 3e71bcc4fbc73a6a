"""From a table of measured chunks to a profile, with a report of the errors of its fit (`layer_fit`).

Rows (Parquet or CSV): tp, pp, lengths (tokens of each sequence as computed; one number when all are equal, else numbers
joined by ';', or a list), sequences, seconds (of a chunk on one stage), bytes (peak memory of the fullest GPU). The
rows of a tp, all pipelines together, give the cost of its layer: a stage costs its part of the layers, no more and no
less. Memory is a line in tokens.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from planning.errors import ProfileError
from planning.layer_cost import LayerCost, Profile
from planning.layer_fit import fit_layer_cost, layer_seconds
from planning.memory import USABLE_FRACTION
from planning.types import ParallelConfig

COLUMNS = ("tp", "pp", "lengths", "sequences", "seconds", "bytes")


@dataclass(frozen=True, slots=True)
class MeasuredChunk:
    """One row of a profile table."""

    config: ParallelConfig
    lengths: tuple[int, ...]
    seconds: float
    memory_bytes: int

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_tokens2(self) -> int:
        return sum(length * length for length in self.lengths)


@dataclass(frozen=True, slots=True)
class FitReport:
    """Relative errors of the fitted seconds of one tensor-parallel degree, and the row where it is worst."""

    tp: int
    num_rows: int
    mean_error: float
    max_error: float
    worst: MeasuredChunk

    def __str__(self) -> str:
        return (
            f"tp {self.tp}: {self.num_rows} rows, mean error {self.mean_error:.1%}, largest {self.max_error:.1%} at "
            f"{self.worst.config} with {len(self.worst.lengths)} sequences of {self.worst.num_tokens} tokens in all"
        )


def read_profile_table(path: Path) -> list[MeasuredChunk]:
    """The rows of a table. Raises ProfileError naming file, row, column and remedy."""
    try:
        table = pl.read_parquet(path) if path.suffix == ".parquet" else pl.read_csv(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ProfileError(f"profile table {path} cannot be read: {error}; give a Parquet or CSV file") from error
    missing = [column for column in COLUMNS if column not in table.columns]
    if missing:
        raise ProfileError(f"profile table {path}: column {missing[0]} is missing; a table has {', '.join(COLUMNS)}")
    return [
        _chunk(row, f"profile table {path}, row {number}") for number, row in enumerate(table.iter_rows(named=True))
    ]


def fit_profile(
    rows: list[MeasuredChunk], name: str, num_layers: int, memory_bytes: int
) -> tuple[Profile, tuple[FitReport, ...]]:
    """A profile of the configurations measured, and how well it fits each tensor-parallel degree.

    The largest chunk of a configuration is what `USABLE_FRACTION` of `memory_bytes` per GPU holds by its memory line;
    with a single size measured, that size. Raises ProfileError when the table is empty.
    """
    if not rows:
        raise ProfileError("the profile table has no rows; measure at least one chunk per tensor-parallel degree")
    layer_cost_by_tp, reports = {}, []
    for tp in sorted({row.config.tp for row in rows}):
        own = [row for row in rows if row.config.tp == tp]
        layer_cost_by_tp[tp], report = _fit_seconds(own, num_layers)
        reports.append(report)
    largest = {
        config: _largest_chunk([row for row in rows if row.config == config], int(USABLE_FRACTION * memory_bytes))
        for config in sorted({row.config for row in rows})
    }
    source = f"fitted to {len(rows)} measured chunks; " + "; ".join(map(str, reports))
    return Profile(name, source, num_layers, layer_cost_by_tp, largest), tuple(reports)


def _chunk(row: dict[str, object], where: str) -> MeasuredChunk:
    given = row["lengths"]
    try:
        numbers = given if isinstance(given, list) else str(given).split(";")
        lengths = [int(str(number)) for number in numbers]
        count, seconds, memory = int(str(row["sequences"])), float(str(row["seconds"])), int(float(str(row["bytes"])))
        config = ParallelConfig(int(str(row["tp"])), int(str(row["pp"])))
    except ValueError as error:
        raise ProfileError(f"{where}: {error}; correct the row") from error
    if len(lengths) == 1:
        lengths *= count
    if len(lengths) != count or min(lengths, default=0) < 1 or not seconds > 0 or min(config.tp, config.pp, memory) < 1:
        raise ProfileError(
            f"{where}: {len(lengths)} lengths for {count} sequences, {seconds} seconds, {memory} bytes; there must be "
            "one length or one per sequence, and all numbers must be positive; correct the row"
        )
    return MeasuredChunk(config, tuple(lengths), seconds, memory)


def _fit_seconds(rows: list[MeasuredChunk], num_layers: int) -> tuple[LayerCost, FitReport]:
    measured = np.array([row.seconds * row.config.pp / num_layers for row in rows])
    sizes = np.array([row.num_tokens for row in rows]), np.array([row.num_tokens2 for row in rows])
    cost = fit_layer_cost(*sizes, measured)
    errors = np.abs(layer_seconds(cost, *sizes) / measured - 1)
    worst = int(errors.argmax())
    report = FitReport(rows[0].config.tp, len(rows), float(errors.mean()), float(errors.max()), rows[worst])
    return cost, report


def _largest_chunk(rows: list[MeasuredChunk], usable_bytes: int) -> int:
    tokens = np.array([row.num_tokens for row in rows], dtype=float)
    memory = np.array([row.memory_bytes for row in rows], dtype=float)
    measured = [row.num_tokens for row in rows if row.memory_bytes <= usable_bytes]
    if len(set(tokens)) == 1:
        return max(measured, default=0)
    slope, intercept = np.polyfit(tokens, memory, 1)
    return max(0, int((usable_bytes - intercept) // slope)) if slope > 0 else max(measured, default=0)
