"""The run folder: where everything of one run lies, who holds it, and whether it may be resumed. No Prefect here."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data_prep.files import sync_to_disk
from data_prep.names import folder_name
from planning.errors import InputError, LobraError

LOCK = "lock"
REPLANNED = ("cluster.", "planner.", "profile.", "training.activation_recompute", "training.sequence_parallel")
"""What may change when a run is planned anew: where and how it trains, never what."""


class RunFolderLockedError(LobraError):
    """Another controller works in this run folder."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def prepared(self) -> Path:
        """Manifest of the tenants' token files with their SHA-256."""
        return self.path / "prepared.json"

    @property
    def initial_adapters(self) -> Path:
        """SHA-256 of the adapters that tenants continue from."""
        return self.path / "initial_adapters.json"

    @property
    def histogram(self) -> Path:
        return self.path / "histogram.parquet"

    @property
    def profile(self) -> Path:
        return self.path / "profile.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def estimate(self) -> Path:
        """What the run was expected to cost each tenant."""
        return self.path / "estimate.json"

    @property
    def steps(self) -> Path:
        return self.path / "steps.jsonl"

    @property
    def step_plans(self) -> Path:
        return self.path / "plans.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def control(self) -> Path:
        """What an operator asks of the run: {"cancel": ["tenant"]}."""
        return self.path / "control.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def figures(self) -> Path:
        return self.path / "figures"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def staging(self) -> Path:
        """Exported adapters that have not passed their probe yet."""
        return self.path / "unprobed"

    def publication(self, tenant: str) -> Path:
        """What the probe found of a tenant's published adapter."""
        return self.path / "published" / f"{folder_name(tenant)}.json"

    def adapter(self, tenant: str) -> Path:
        return self.path / "adapters" / folder_name(tenant)

    @property
    def is_finished(self) -> bool:
        return self.summary.exists()

    def refuse_finished(self) -> None:
        """Raise InputError if the run is finished."""
        if self.is_finished:
            raise InputError(
                f"{self.path}: this run is finished; add --fresh to run again (the old folder is kept, renamed)"
            )

    def forget(self) -> None:
        """Let another configuration have this folder, as long as nothing was trained in it. Rejects stay to be read."""
        if not self.steps.exists():
            self._unlink_planned()
            for path in (self.histogram, self.prepared, self.initial_adapters, self.config):
                path.unlink(missing_ok=True)

    def forget_plan(self) -> None:
        """Have profile and plan made anew. What was dispatched under the old plan is kept aside, not replayed."""
        if self.step_plans.exists():
            self.step_plans.rename(self.step_plans.with_name(f"plans-until-{_now()}.jsonl"))
        self._unlink_planned()

    def _unlink_planned(self) -> None:
        for path in (self.plan, self.profile, self.estimate):
            path.unlink(missing_ok=True)


@contextmanager
def open_run_folder(path: Path, config: dict[str, Any], fresh: bool, replan: bool = False) -> Iterator[RunFolder]:
    """Create or resume a run folder and hold its lock.

    An unfinished folder of the same configuration resumes; with `replan` its profile and plan are made anew, and the
    keys of `REPLANNED` may differ. Raises InputError for a finished folder without `fresh`, or for another
    configuration (naming the keys that differ), and RunFolderLockedError if another controller is at work.
    """
    if fresh and replan:
        raise InputError("a fresh run is planned anyway; give either --fresh or --replan")
    folder = RunFolder(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    with lock_folder(path):
        if fresh and folder.config.exists():
            _set_aside(path)
        folder.refuse_finished()
        if folder.config.exists():
            _refuse_other_configuration(folder, config, replan)
            if replan:
                folder.forget_plan()
        write_json(folder.config, config)
        try:
            yield folder
        except InputError:
            folder.forget()
            raise


def write_json(path: Path, content: Any) -> None:
    """Write JSON whole or not at all, and on disk before returning."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sync_to_disk(partial)
    os.replace(partial, path)
    sync_to_disk(path.parent)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _refuse_other_configuration(folder: RunFolder, config: dict[str, Any], replan: bool) -> None:
    keys = changed_keys(read_json(folder.config), config)
    fixed = [key for key in keys if key == "planner.strategy" or not key.startswith(REPLANNED)]
    if fixed if replan else keys:
        remedy = "" if fixed else "add --replan to go on with a new plan, "
        raise InputError(
            f"{folder.path}: an unfinished run of another configuration lies here, these keys differ: "
            f"{', '.join(fixed if replan else keys)}. "
            f"Change them back to resume it, {remedy}choose another --run-dir, or add --fresh to start anew"
        )


def changed_keys(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Dotted keys whose values differ between two resolved configurations."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            changed
            for key in sorted(set(old) | set(new))
            for changed in changed_keys(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [changed for i, (a, b) in pairs for changed in changed_keys(a, b, f"{prefix}[{i}]")]
    return [] if old == new else [prefix]


def _set_aside(path: Path) -> None:
    """Move everything but the lock to a sibling folder named by the time."""
    aside = path.with_name(f"{path.name}.{_now()}")
    aside.mkdir(mode=0o700)
    for item in path.iterdir():
        if item.name != LOCK:
            item.rename(aside / item.name)


def _now() -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"


@contextmanager
def lock_folder(path: Path) -> Iterator[None]:
    """Hold a run folder. Raises RunFolderLockedError, with the holder's process, if another process does."""
    with (path / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise RunFolderLockedError(
                f"{path}: another run holds this folder (process {file.read().strip() or 'unknown'}); "
                "wait for it or choose another --run-dir"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def is_locked(path: Path) -> bool:
    """Whether a controller holds the run folder. Changes nothing."""
    lock = path / LOCK
    if not lock.exists():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
