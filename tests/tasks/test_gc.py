"""Garbage collection removes what is old and unused, and nothing else."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from planning.errors import InputError
from tasks.gc import GcRequest, Kind, collect_garbage
from tasks.run_folder import lock_folder, write_json

KEYS = {letter: letter * 64 for letter in "abc"}


def age(folder: Path, days: float) -> None:
    then = time.time() - days * 86400
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (then, then))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    (folder / ".cache").mkdir(parents=True)
    return folder


@pytest.fixture
def make_run(runs: Path) -> Callable[..., Path]:
    """`make_run(name, days, finished, keys)`: a run folder that uses token files, last changed `days` ago."""

    def make(name: str, days: float, finished: bool = True, keys: str = "") -> Path:
        folder = runs / name
        folder.mkdir(parents=True)
        write_json(folder / "config.json", {})
        entries = [{"tenant": key, "token_path": f"{runs}/.cache/{KEYS[key]}/tokens.arrow"} for key in keys]
        entries.append({"tenant": "left out", "failure": "no row is left"})
        write_json(folder / "prepared.json", {"schema_version": 1, "tenants": entries})
        (folder / "steps.jsonl").write_text("x" * 1000)
        (folder / "lock").write_text("1")
        if finished:
            write_json(folder / "summary.json", {})
        age(folder, days)
        return folder

    return make


@pytest.fixture
def make_entry(runs: Path) -> Callable[..., Path]:
    def make(key: str, days: float) -> Path:
        folder = runs / ".cache" / KEYS[key]
        folder.mkdir()
        (folder / "tokens.arrow").write_bytes(bytes(5000))
        age(folder, days)
        return folder

    return make


def collect(runs: Path, **options: bool) -> list[tuple[str, Kind]]:
    request = GcRequest(runs, runs / ".cache", keep_days=7, **options)
    return [(str(removal.path.relative_to(runs)), removal.kind) for removal in collect_garbage(request)]


def test_old_finished_and_set_aside_runs_go_and_young_or_unfinished_ones_stay(runs: Path, make_run) -> None:
    make_run("old", 8)
    make_run("young", 6)
    make_run("unfinished", 100, finished=False)
    make_run("young.20260101T000000.000001", 100, finished=False)
    make_run("nightly-compare/lobra-padded", 9)

    assert collect(runs) == [
        ("nightly-compare/lobra-padded", Kind.RUN),
        ("old", Kind.RUN),
        ("young.20260101T000000.000001", Kind.SET_ASIDE),
    ]
    assert sorted(path.name for path in runs.iterdir()) == [".cache", "nightly-compare", "unfinished", "young"]
    assert collect(runs, unfinished=True) == [("unfinished", Kind.RUN)]


def test_a_comparison_goes_when_its_last_run_has_gone(runs: Path, make_run) -> None:
    make_run("both-compare/lobra-padded", 9)
    make_run("both-compare/task_fused-padded", 1)
    make_run("gone-compare/lobra-padded", 9)
    for name in ("both-compare", "gone-compare"):
        write_json(runs / name / "comparison.json", {})
        then = time.time() - 9 * 86400
        os.utime(runs / name / "comparison.json", (then, then))

    assert collect(runs)[-1] == ("gone-compare", Kind.COMPARISON)
    assert (runs / "both-compare" / "comparison.json").exists()
    assert not (runs / "gone-compare").exists()


def test_a_locked_run_stays_with_its_token_files(runs: Path, make_run, make_entry) -> None:
    held = make_run("held", 100, keys="a")
    make_entry("a", 100)
    with lock_folder(held):
        assert collect(runs, unfinished=True) == []
    assert held.exists()
    assert len(collect(runs)) == 2


def test_token_files_stay_as_long_as_a_kept_run_uses_them(runs: Path, make_run, make_entry) -> None:
    make_run("old", 8, keys="ab")
    make_run("unfinished", 100, finished=False, keys="a")
    for key in "abc":
        make_entry(key, days=100 if key != "c" else 1)

    assert collect(runs) == [("old", Kind.RUN), (f".cache/{KEYS['b']}", Kind.CACHE_ENTRY)]
    assert sorted(path.name for path in (runs / ".cache").iterdir()) == [KEYS["a"], KEYS["c"]]


def test_no_token_file_goes_while_a_run_is_still_preparing(runs: Path, make_run, make_entry) -> None:
    make_entry("a", 100)
    preparing = make_run("preparing", 0, finished=False)
    (preparing / "prepared.json").unlink()
    with lock_folder(preparing):
        assert collect(runs) == []
    assert collect(runs) == [(f".cache/{KEYS['a']}", Kind.CACHE_ENTRY)]


def test_a_dry_run_says_the_same_and_removes_nothing(runs: Path, make_run, make_entry) -> None:
    folder, entry = make_run("old", 8, keys="a"), make_entry("a", 8)
    wanted = [("old", Kind.RUN), (f".cache/{KEYS['a']}", Kind.CACHE_ENTRY)]
    assert collect(runs, dry_run=True) == wanted
    assert folder.exists()
    assert entry.exists()
    assert collect(runs) == wanted


def test_other_folders_links_and_interrupted_removals_are_told_apart(runs: Path, make_run, tmp_path: Path) -> None:
    (runs / "demo-assets").mkdir()
    (runs / "demo-assets" / "config.txt").write_text("")
    (runs / ".cache" / "profiles").mkdir()
    elsewhere = make_run("moved", 100).rename(tmp_path / "elsewhere")
    (runs / "link").symlink_to(elsewhere)
    (runs / "half.removing" / "logs").mkdir(parents=True)
    for path in runs.iterdir():
        age(path, 100)

    assert collect(runs, unfinished=True) == [("half.removing", Kind.LEFT_OVER)]
    assert (elsewhere / "summary.json").exists()


def test_a_folder_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none: no such folder.*--runs"):
        collect_garbage(GcRequest(tmp_path / "none", tmp_path, 7))
