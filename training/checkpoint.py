"""Checkpoint folders that are whole or absent.

    step-00000020/
      adapters/<tenant folder>.safetensors     canonical A and B, named as peft names them
      optimiser/<tenant folder>.safetensors    exp_avg.* and exp_avg_sq.* of the same names
      best/<tenant folder>.safetensors         A and B of the lowest evaluation loss, of tenants that publish those
      controller.json                          step, and per tenant status and number of updates
      manifest.json                            SHA-256 of every other file

Ranks write the tensors into `<name>.partial`; the controller adds its state and the manifest, syncs everything to disk
and renames. A folder whose manifest does not match is skipped in favour of the one before. No torch here.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data_prep.files import file_sha256, sync_to_disk
from planning.errors import InputError, LobraError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
PARTIAL = ".partial"
CONTROLLER_STATE = "controller.json"


class CheckpointError(LobraError):
    """A checkpoint cannot be written or read."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint: its folder and the controller's state in it."""

    folder: Path
    state: dict

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self.state["step"]


def adapter_file(folder: Path, tenant_folder: str) -> Path:
    return folder / "adapters" / f"{tenant_folder}.safetensors"


def optimiser_file(folder: Path, tenant_folder: str) -> Path:
    return folder / "optimiser" / f"{tenant_folder}.safetensors"


def best_file(folder: Path, tenant_folder: str) -> Path:
    return folder / "best" / f"{tenant_folder}.safetensors"


def published_file(folder: Path, tenant_folder: str) -> Path:
    """The adapter to publish: the best one where a best one is kept, else the last."""
    best = best_file(folder, tenant_folder)
    return best if best.exists() else adapter_file(folder, tenant_folder)


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, root: Path, keep: int) -> None:
        self.root = root
        self.keep = keep

    def begin(self, step: int) -> Path:
        """An empty folder for the checkpoint of `step`, for the ranks to write their tensors into.

        Raises CheckpointError when the disk refuses.
        """
        partial = self._folder(step).with_suffix(PARTIAL)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            for name in ("adapters", "optimiser", "best"):
                (partial / name).mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(
                f"cannot write checkpoint {partial}: {error}; free disk space and run again"
            ) from error
        return partial

    def commit(self, partial: Path, state: dict) -> Path:
        """Make a begun folder a checkpoint, and prune old ones after it verifies.

        Raises CheckpointError when the disk refuses; older checkpoints are untouched then.
        """
        final = self._folder(state["step"])
        try:
            _write_json(partial / CONTROLLER_STATE, {"schema_version": SCHEMA_VERSION, **state})
            _write_json(partial / MANIFEST, {"schema_version": SCHEMA_VERSION, "sha256": _hashes(partial)})
            for path in (*partial.rglob("*"), partial):
                sync_to_disk(path)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            sync_to_disk(self.root)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(f"cannot write checkpoint {final}: {error}; free disk space and run again") from error
        read_checkpoint(final)
        stale = [path for path in self.root.glob(f"step-*{PARTIAL}") if path != partial]
        for old in (*self._folders()[self.keep :], *stale):
            shutil.rmtree(old)
        return final

    def latest(self, on_damaged: Callable[[Path, str], None] = lambda _path, _reason: None) -> Checkpoint | None:
        """The newest checkpoint that verifies; damaged ones are reported and passed over."""
        for folder in self._folders():
            try:
                return read_checkpoint(folder)
            except CheckpointError as error:
                on_damaged(folder, str(error))
        return None

    def latest_of(self, run: str, on_damaged: Callable[[Path, str], None]) -> Checkpoint | None:
        """The newest checkpoint that verifies. Raises InputError unless it is of the run with this identity."""
        checkpoint = self.latest(on_damaged)
        if checkpoint is not None and checkpoint.state.get("run") != run:
            raise InputError(
                f"{checkpoint.folder} is the checkpoint of another run: its base model or tenants differ; move it "
                "away, or give this run a folder of its own"
            )
        return checkpoint

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of `step`, verified. Raises InputError, with the steps that there are, if it was not kept."""
        folder = self._folder(step)
        if folder not in self._folders():
            kept = ", ".join(str(int(path.name.removeprefix("step-"))) for path in self._folders())
            raise InputError(f"{self.root} has no checkpoint of step {step}; there are those of: {kept or 'no step'}")
        return read_checkpoint(folder)

    def _folder(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def _folders(self) -> list[Path]:
        """Complete folders, newest first."""
        if not self.root.is_dir():
            return []
        return sorted((path for path in self.root.glob("step-*") if path.suffix != PARTIAL), reverse=True)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verify every file against the manifest. Raises CheckpointError that names what is damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        state = json.loads((folder / CONTROLLER_STATE).read_text())
        found = _hashes(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder} is incomplete: {error}") from error
    if state.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"checkpoint {folder} has schema version {state.get('schema_version')}, not {SCHEMA_VERSION}"
        )
    if found != manifest["sha256"]:
        differing = sorted(
            name for name in set(found) | set(manifest["sha256"]) if found.get(name) != manifest["sha256"].get(name)
        )
        raise CheckpointError(f"checkpoint {folder} is damaged: {', '.join(differing)} differ from the manifest")
    return Checkpoint(folder, state)


def _hashes(folder: Path) -> dict[str, str]:
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            hashes[str(path.relative_to(folder))] = file_sha256(path)
    return hashes


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True))
