"""Removes what old runs left behind: finished run folders, folders set aside by --fresh, and unused token files.

Never touched: a run that a controller holds, an unfinished one (unless asked), token files that a kept run has in its
prepared.json, any folder that is no run folder, and anything behind a symbolic link. Runs outside the folder given are
not known here: their token files are rebuilt when they resume. A folder is renamed before it is removed, so that an
interrupted removal is completed by the next one.
"""

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from planning.errors import InputError
from tasks.disk import folder_bytes
from tasks.run_folder import LOCK, RunFolder, RunFolderLockedError, is_locked, lock_folder, read_json

SECONDS_PER_DAY = 86400.0
SET_ASIDE_NAME = re.compile(r".+\.\d{8}T\d{6}\.\d{6}")
CACHE_KEY = re.compile(r"[0-9a-f]{64}")
REMOVING = ".removing"


class Kind(StrEnum):
    """What a removed folder was."""

    RUN = "run"
    SET_ASIDE = "set aside"
    COMPARISON = "comparison"
    CACHE_ENTRY = "token files"
    PREVIEW = "preview"
    LEFT_OVER = "left over"


@dataclass(frozen=True, slots=True)
class Removal:
    """A folder that was removed, or would be."""

    path: Path
    kind: Kind
    num_bytes: int
    age_days: float


@dataclass(frozen=True, slots=True)
class GcRequest:
    """Where to look, and what is old enough."""

    runs: Path
    cache_dir: Path
    keep_days: float
    unfinished: bool = False
    dry_run: bool = False


def collect_garbage(request: GcRequest) -> list[Removal]:
    """Remove what `request` describes and say what it was. Raises InputError if there is no such folder."""
    if not request.runs.is_dir():
        raise InputError(f"{request.runs}: no such folder; give the folder that holds the runs with --runs")
    removals = []
    kept: list[Path] = []
    for folder in _run_folders(request.runs):
        if (removal := _old_run(folder, request)) and _remove(removal, request.dry_run):
            removals.append(removal)
        else:
            kept.append(folder)
    for removal in (*_old_comparisons(kept, request), *_old_cache_entries(kept, request)):
        if _remove(removal, request.dry_run):
            removals.append(removal)
    return removals


def _run_folders(runs: Path) -> Iterator[Path]:
    """Run folders of `runs`, and those one level below (the runs of a comparison)."""
    for path in _subfolders(runs):
        if _is_run(path):
            yield path
        else:
            yield from (child for child in _subfolders(path) if _is_run(child))


def _is_run(path: Path) -> bool:
    return RunFolder(path).config.is_file() or path.name.endswith(REMOVING)


def _old_run(path: Path, request: GcRequest) -> Removal | None:
    """A run folder that may go, or None."""
    if path.name.endswith(REMOVING):
        return Removal(path, Kind.LEFT_OVER, folder_bytes(path), _age_days(path))
    age_days = _age_days(path)
    is_set_aside = SET_ASIDE_NAME.fullmatch(path.name) is not None
    may_go = is_set_aside or request.unfinished or RunFolder(path).is_finished
    if age_days < request.keep_days or not may_go or is_locked(path):
        return None
    return Removal(path, Kind.SET_ASIDE if is_set_aside else Kind.RUN, folder_bytes(path), age_days)


def _old_comparisons(kept: list[Path], request: GcRequest) -> Iterator[Removal]:
    """Tables and figures of comparisons whose runs are all gone."""
    used = {path.parent for path in kept}
    for path in _subfolders(request.runs):
        if (path / "comparison.json").is_file() and path not in used and _age_days(path) >= request.keep_days:
            yield Removal(path, Kind.COMPARISON, folder_bytes(path), _age_days(path))


def _old_cache_entries(kept: list[Path], request: GcRequest) -> Iterator[Removal]:
    """Token files that no kept run has, and rejects of `lobra plan` and `lobra validate`."""
    if any(is_locked(path) and not RunFolder(path).prepared.exists() for path in kept):
        return  # a run is preparing right now: which entries it uses is not known yet
    used = {key for path in kept for key in _cache_keys(RunFolder(path))}
    for path in _subfolders(request.cache_dir):
        if CACHE_KEY.fullmatch(path.name) and path.name not in used and _age_days(path) >= request.keep_days:
            yield Removal(path, Kind.CACHE_ENTRY, folder_bytes(path), _age_days(path))
        elif path.name.endswith(REMOVING):
            yield Removal(path, Kind.LEFT_OVER, folder_bytes(path), _age_days(path))
    for path in _subfolders(request.cache_dir / "preview"):
        if _age_days(path) >= request.keep_days:
            yield Removal(path, Kind.PREVIEW, folder_bytes(path), _age_days(path))


def _cache_keys(folder: RunFolder) -> set[str]:
    if not folder.prepared.exists():
        return set()
    entries = read_json(folder.prepared)["tenants"]
    return {Path(entry["token_path"]).parent.name for entry in entries if "token_path" in entry}


def _remove(removal: Removal, dry_run: bool) -> bool:
    """Whether the folder is gone, or would be; not if a controller took it meanwhile."""
    if dry_run:
        return True
    path = removal.path
    if removal.kind is not Kind.RUN:
        return _rename_and_delete(path)
    with suppress(RunFolderLockedError), lock_folder(path):
        return _rename_and_delete(path)
    return False


def _rename_and_delete(path: Path) -> bool:
    doomed = path if path.name.endswith(REMOVING) else path.rename(path.with_name(path.name + REMOVING))
    shutil.rmtree(doomed)
    return True


def _subfolders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())


def _age_days(folder: Path) -> float:
    """Days since a file directly in the folder changed, but for the lock, which a mere look at the run changes."""
    times = [path.lstat().st_mtime for path in folder.iterdir() if path.name != LOCK and not path.is_dir()]
    return (time.time() - max(times, default=folder.stat().st_mtime)) / SECONDS_PER_DAY
