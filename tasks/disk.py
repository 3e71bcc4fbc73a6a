"""Whether a run's files fit on the disk, judged before it starts. No Prefect here.

    token files   about the bytes of the data files (4 bytes per token, about 4 characters per token), 4 times those of
                  gzipped and Parquet files
    checkpoints   (kept + the one being written) x 3 tensors (weight, two moments; 4 where the best weight by evaluation
                  loss is kept) x 4 bytes x adapter parameters
    adapters      4 bytes x adapter parameters

Journals, logs and figures are small beside these and not counted.
"""

import shutil
from collections.abc import Sequence
from operator import mul
from pathlib import Path

from planning.errors import InputError
from training.base_model import BaseModel
from training.config import Publish, TenantConfig, TrainingConfig

BYTES_PER_VALUE = 4
TENSORS_PER_PARAMETER = 3
PACKED_RATIO = 4
MIB = 2**20


class DiskFullError(InputError):
    """The run would fill a disk."""


def check_free_disk(
    tenants: Sequence[TenantConfig], base: BaseModel, training: TrainingConfig, cache_dir: Path, run_dir: Path
) -> None:
    """Raise DiskFullError unless token cache and run folder have room; a resumed run's own files count as room."""
    num_parameters = [base.num_adapter_parameters(t.adapter.rank, t.adapter.target_modules) for t in tenants]
    num_tensors = [TENSORS_PER_PARAMETER + _keeps_best(tenant) for tenant in tenants]
    adapter_bytes = BYTES_PER_VALUE * sum(num_parameters)
    one_checkpoint_bytes = BYTES_PER_VALUE * sum(map(mul, num_parameters, num_tensors))
    checkpoint_bytes = (training.keep_checkpoints + 1) * one_checkpoint_bytes
    token_bytes = sum(_token_bytes(tenant.dataset.path) for tenant in tenants)
    run_bytes = max(0, checkpoint_bytes + adapter_bytes - folder_bytes(run_dir))
    needs = [
        (cache_dir, token_bytes, f"{shown_bytes(token_bytes)} of token files"),
        (
            run_dir,
            run_bytes,
            f"{training.keep_checkpoints + 1} checkpoints of {shown_bytes(one_checkpoint_bytes)} and "
            f"adapters of {shown_bytes(adapter_bytes)}",
        ),
    ]
    by_disk: dict[int, list[tuple[Path, int, str]]] = {}
    for path, num_bytes, what in needs:
        existing = _nearest_existing(path)
        by_disk.setdefault(existing.stat().st_dev, []).append((existing, num_bytes, what))
    for parts in by_disk.values():
        needed = sum(num_bytes for _, num_bytes, _ in parts)
        free = shutil.disk_usage(parts[0][0]).free
        if needed > free:
            raise DiskFullError(
                f"the run needs about {shown_bytes(needed)} below {parts[0][0].resolve()} "
                f"({'; '.join(what for _, _, what in parts)}), but {shown_bytes(free)} are free; free some with "
                "`lobra gc`, lower training.keep_checkpoints, or choose another --run-dir or data.cache_dir"
            )


def _keeps_best(tenant: TenantConfig) -> bool:
    return tenant.evaluation is not None and tenant.evaluation.publish is Publish.BEST


def _token_bytes(data: Path) -> int:
    """0 for a file that is missing: preparation says so."""
    if not data.is_file():
        return 0
    return data.stat().st_size * (PACKED_RATIO if data.suffix in (".gz", ".parquet") else 1)


def folder_bytes(folder: Path) -> int:
    """Size of all files below a folder; 0 if there is none."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_symlink() or path.is_file())


def shown_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 1024 / MIB:.1f} GiB" if num_bytes >= 1024 * MIB else f"{num_bytes / MIB:.1f} MiB"


def _nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())
