"""Checkpoints are whole or absent."""

import json
import os
from pathlib import Path

import pytest

from planning.errors import InputError
from training.checkpoint import CheckpointError, CheckpointStore, read_checkpoint


def save(store: CheckpointStore, step: int) -> None:
    partial = store.begin(step)
    for name in ("adapters", "optimiser"):
        (partial / name / "a.safetensors").write_bytes(str(step).encode())
    store.commit(partial, {"step": step, "tenants": {}})


def save_steps(root: Path, *steps: int, keep: int = 2) -> CheckpointStore:
    store = CheckpointStore(root, keep)
    for step in steps:
        save(store, step)
    return store


def test_the_newest_checkpoint_is_found_and_older_ones_are_pruned(tmp_path: Path) -> None:
    store = save_steps(tmp_path, 5, 10, 15)
    assert store.latest().step == 15
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000015"]


def test_a_checkpoint_is_found_by_its_step_and_a_pruned_one_is_named_with_what_there_is(tmp_path: Path) -> None:
    store = save_steps(tmp_path, 5, 10, 15)
    assert store.at(10).step == 10
    with pytest.raises(InputError, match="no checkpoint of step 5; there are those of: 15, 10"):
        store.at(5)


@pytest.mark.parametrize("damage", ["flip", "remove", "truncate_manifest", "extra"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    store = save_steps(tmp_path, 5, 10)
    newest = tmp_path / "step-00000010"
    tensor = newest / "adapters" / "a.safetensors"
    match damage:
        case "flip":
            tensor.write_bytes(b"x" + tensor.read_bytes()[1:])
        case "remove":
            tensor.unlink()
        case "truncate_manifest":
            (newest / "manifest.json").write_text('{"sha')
        case "extra":
            (newest / "adapters" / "b.safetensors").write_bytes(b"")
    reported = []
    assert store.latest(lambda folder, reason: reported.append(folder.name)).step == 5
    assert reported == ["step-00000010"]


def test_a_write_that_fails_leaves_older_checkpoints_and_nothing_partial(tmp_path: Path, monkeypatch) -> None:
    store = save_steps(tmp_path, 5)

    def full_disk(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(CheckpointError, match=r"No space left.*free disk space"):
        save(store, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    assert store.latest().step == 5


def test_a_partial_folder_of_a_killed_writer_is_never_read(tmp_path: Path) -> None:
    store = save_steps(tmp_path, 5)
    (tmp_path / "step-00000010.partial" / "adapters").mkdir(parents=True)
    assert store.latest().step == 5
    save(store, 10)
    assert store.latest().step == 10


def test_a_checkpoint_of_another_schema_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)
    state = tmp_path / "step-00000005" / "controller.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "schema_version": 99}))
    with pytest.raises(CheckpointError, match="schema version 99"):
        read_checkpoint(tmp_path / "step-00000005")
