"""Removes prepared tokens that no run has used for a while."""

import os
import re
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from data_prep.errors import DatasetError

ENTRY = re.compile(r"(\.pruned-)?[0-9a-f]{64}")
SECONDS_PER_DAY = 86400


@dataclass(frozen=True, slots=True)
class PruneReport:
    """Entries removed and kept, and the bytes that the removed ones held."""

    removed: tuple[Path, ...]
    num_kept: int
    freed_bytes: int


def prune_cache(cache_dir: Path, keep_days: float, in_use: Collection[Path]) -> PruneReport:
    """Removes entries last used or written more than `keep_days` ago (0: all) that hold no path of `in_use`.

    Only entries of `data_prep.cache` are touched; a cache folder that does not exist has none. An entry disappears
    whole: a process that has its files mapped keeps them. Raises DatasetError when the cache cannot be changed.
    """
    oldest = time.time() - keep_days * SECONDS_PER_DAY
    used = [path.resolve() for path in in_use]
    removed, num_kept, freed_bytes = [], 0, 0
    try:
        entries = (
            sorted(path for path in cache_dir.iterdir() if ENTRY.fullmatch(path.name)) if cache_dir.is_dir() else []
        )
        for entry in entries:
            stats = [path.stat() for path in (entry, *entry.iterdir())]
            resolved = entry.resolve()
            if max(stat.st_mtime for stat in stats) > oldest or any(path.is_relative_to(resolved) for path in used):
                num_kept += 1
                continue
            hidden = entry.with_name(f".pruned-{entry.name[-64:]}")
            os.rename(entry, hidden)
            shutil.rmtree(hidden)
            removed.append(entry)
            freed_bytes += sum(stat.st_size for stat in stats[1:])
    except OSError as error:
        raise DatasetError(
            f"data.cache_dir: {cache_dir} cannot be pruned ({error}); correct its permissions"
        ) from error
    return PruneReport(tuple(removed), num_kept, freed_bytes)
