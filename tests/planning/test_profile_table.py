"""Measured chunks to a profile: planted coefficients come back, and every damaged row is refused."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from planning.candidates import candidates_of_profile
from planning.config import PlannerConfig
from planning.errors import ProfileError
from planning.profile import read_profile, write_profile
from planning.profile_table import fit_profile, read_profile_table
from planning.types import ParallelConfig

A, B, C = 2e-3, 5e-6, 1e-9
GIB = 2**30


def planted(noise: float = 0.0) -> list[dict[str, object]]:
    rng = np.random.default_rng(0)
    return [
        {
            "tp": tp,
            "pp": pp,
            "lengths": str(length),
            "sequences": count,
            "seconds": (A + B / tp * count * length + C / tp * count * length**2)
            * (8 / pp)
            * (1 + noise * rng.standard_normal()),
            "bytes": GIB + count * length * 2**20,
        }
        for tp in (1, 2)
        for pp in (1, 2)
        for length in (64, 256, 1024)
        for count in (1, 2, 4)
    ]


def write(rows: list[dict[str, object]], path: Path) -> Path:
    table = pl.DataFrame(rows)
    if path.suffix == ".parquet":
        table.write_parquet(path)
    else:
        table.write_csv(path)
    return path


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_planted_coefficients_and_memory_come_back(tmp_path: Path, suffix: str) -> None:
    rows = read_profile_table(write(planted(), tmp_path / f"table.{suffix}"))
    profile, reports = fit_profile(rows, "mine", 8, 4 * GIB)
    cost = profile.layer_cost_by_tp[2]
    assert (cost.fixed_seconds, cost.seconds_per_token, cost.seconds_per_token2) == pytest.approx((A, B / 2, C / 2))
    assert max(report.max_error for report in reports) < 1e-6
    assert profile.max_chunk_tokens is not None
    assert profile.max_chunk_tokens[ParallelConfig(1, 1)] == int((0.9 * 4 * GIB - GIB) // 2**20)


def test_noise_is_reported_with_its_worst_row(tmp_path: Path) -> None:
    rows = read_profile_table(write(planted(noise=0.03), tmp_path / "table.csv"))
    _, reports = fit_profile(rows, "mine", 8, 4 * GIB)
    for report in reports:
        assert 0.005 < report.mean_error < 0.04
        assert report.max_error >= report.mean_error
        assert report.worst.config.tp == report.tp
        assert f"tp {report.tp}: 18 rows" in str(report)


def test_coefficients_are_never_negative() -> None:
    rows = planted()
    for row in rows:
        row["seconds"] = 1e-5 * int(str(row["lengths"])) * int(str(row["sequences"])) ** 1.2  # faster than linear
    frame = pl.DataFrame(rows)
    from planning.profile_table import _chunk

    profile, _ = fit_profile([_chunk(row, "row") for row in frame.iter_rows(named=True)], "mine", 8, 4 * GIB)
    for cost in profile.layer_cost_by_tp.values():
        assert min(cost.fixed_seconds, cost.seconds_per_token, cost.seconds_per_token2) >= 0


def test_a_single_point_gives_a_usable_profile(tmp_path: Path) -> None:
    rows = read_profile_table(write(planted()[:1], tmp_path / "table.csv"))
    profile, _ = fit_profile(rows, "point", 8, 4 * GIB)
    write_profile(profile, tmp_path / "point.json")
    candidate = candidates_of_profile(read_profile(tmp_path / "point.json"), 4, PlannerConfig()).usable[0]
    assert candidate.chunk_seconds(1, 64) == pytest.approx(rows[0].seconds)
    assert candidate.max_chunk_tokens == 64


def test_packed_rows_list_their_lengths(tmp_path: Path) -> None:
    row = planted()[0] | {"lengths": "10;20;34", "sequences": 3}
    assert read_profile_table(write([row], tmp_path / "table.csv"))[0].num_tokens2 == 100 + 400 + 34 * 34


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"seconds": -1.0}, "must be positive"),
        ({"lengths": "3;4", "sequences": 3}, "2 lengths for 3 sequences"),
        ({"lengths": "three"}, "three"),
        ({"tp": 0}, "must be positive"),
    ],
)
def test_a_damaged_row_is_refused_with_its_number(tmp_path: Path, damage: dict[str, object], message: str) -> None:
    with pytest.raises(ProfileError, match=rf"table\.csv, row 0.*{message}"):
        read_profile_table(write([planted()[0] | damage], tmp_path / "table.csv"))


def test_a_table_without_rows_or_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no rows"):
        fit_profile([], "none", 8, GIB)
    (tmp_path / "bad.csv").write_text("tp,pp\n1,1\n")
    with pytest.raises(ProfileError, match="column lengths is missing"):
        read_profile_table(tmp_path / "bad.csv")
    with pytest.raises(ProfileError, match="cannot be read"):
        read_profile_table(tmp_path / "none.parquet")
