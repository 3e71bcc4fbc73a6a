"""Where measured profiles are kept, and what each was measured for. torch is loaded only to name a GPU.

    <model folder>-<dtype>-<key>.json           the profile, as planning reads it
    <model folder>-<dtype>-<key>.report.json    what it was measured for, error of the fit, measured and modelled bytes
    <model folder>-<dtype>-<key>.parquet        every measured chunk

The key is a digest of what a profile depends on, so another model, machine or fleet looks for another file, and a file
that was copied to a name that is not its own is refused. The profile is written last: where it stands, all three do.
"""

import hashlib
import json
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from data_prep.files import replace_atomically
from planning.config import Backend, ClusterConfig
from planning.errors import InputError
from planning.profile import Profile, read_profile, write_profile
from planning.types import ActivationPolicy, ModelShape
from training.base_model import BaseModel
from training.config import BaseModelConfig, TenantConfig
from training.profile_fit import MeasuredProfile

SCHEMA_VERSION = 1
REMEDY = "measure it with `lobra profile RUN.yaml`, or set profile.source: file or preset"


@dataclass(frozen=True, slots=True)
class ProfileIdentity:
    """What measured times depend on. `num_cores` is None on GPUs."""

    architecture: str
    shape: ModelShape
    dtype: str
    hardware: str
    num_cores: int | None
    num_ranks: int
    target_modules: tuple[str, ...]
    activations: ActivationPolicy

    @property
    def key(self) -> str:
        return identity_key(asdict(self))


def identity_key(content: dict[str, object]) -> str:
    """Digest of an identity in the form in which reports hold it."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def profile_identity(
    base: BaseModel,
    base_model: BaseModelConfig,
    tenants: tuple[TenantConfig, ...],
    cluster: ClusterConfig,
    activations: ActivationPolicy,
) -> ProfileIdentity:
    """The identity of a profile that this machine would measure."""
    gpu = gpu_name(cluster.backend)
    return ProfileIdentity(
        architecture=base.architecture,
        shape=base.shape(base_model.dtype),
        dtype=base_model.dtype.value,
        hardware=gpu or cpu_name(),
        num_cores=None if gpu else len(os.sched_getaffinity(0)),
        num_ranks=cluster.num_gpus,
        target_modules=tuple(sorted({target for tenant in tenants for target in tenant.adapter.target_modules})),
        activations=activations,
    )


def cpu_name() -> str:
    """The processor's name as the kernel gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def gpu_name(backend: Backend) -> str | None:
    """Name of the GPU that the fleet's ranks would use; None where they would use the CPU."""
    if backend is Backend.GLOO or shutil.which("nvidia-smi") is None:
        return None
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def stored_path(folder: Path, base_model: BaseModelConfig, identity: ProfileIdentity) -> Path:
    """Where the profile of an identity lies."""
    return folder / f"{base_model.path.name}-{base_model.dtype.value}-{identity.key}.json"


def store_profile(measured: MeasuredProfile, identity: ProfileIdentity, path: Path) -> None:
    """Write the three files of a measured profile."""
    rows = [
        {
            "tp": timing.config.tp,
            "pp": timing.config.pp,
            "sequences": timing.num_sequences,
            "length": timing.length,
            "batching": timing.batching.value,
            "seconds": timing.seconds,
            "bytes": timing.peak_bytes,
        }
        for timing in measured.fit.timings
    ]
    with replace_atomically(path.with_suffix(".parquet")) as temporary:
        pl.DataFrame(rows).write_parquet(temporary, metadata={"schema_version": str(SCHEMA_VERSION)})
    with replace_atomically(_report_path(path)) as temporary:
        temporary.write_text(json.dumps(report(measured, identity), indent=1) + "\n", encoding="utf-8")
    with replace_atomically(path) as temporary:
        write_profile(measured.profile, temporary)


def report(measured: MeasuredProfile, identity: ProfileIdentity) -> dict[str, object]:
    """What was measured, for whom, how well it fits, and where the memory model differs. Plain JSON."""
    fit = measured.fit
    return {
        "schema_version": SCHEMA_VERSION,
        "measured_for": asdict(identity),
        "fit": {
            "mean_error": fit.mean_error,
            "max_error": fit.max_error,
            "worst": str(fit.worst),
            "mean_error_by_batching": {
                batching.value: fit.mean_error_of(batching) for batching in {timing.batching for timing in fit.timings}
            },
        },
        "configurations": [
            {
                "tp": config.tp,
                "pp": config.pp,
                "stage_factor": entry.stage_factor,
                "step_overhead_seconds": entry.step_overhead_seconds,
                "measured_bytes_per_token": entry.bytes_per_token,
                "modelled_bytes_per_token": measured.modelled_bytes_per_token[config],
            }
            for config, entry in measured.profile.measured.items()
        ],
    }


def read_stored(path: Path) -> Profile:
    """The measured profile at a path from `stored_path`.

    Raises InputError with the remedy when none is stored, naming how those that are there differ, or when the file was
    measured for something else than its name says.
    """
    if not path.exists():
        raise InputError(
            f"no measured profile of this model on this machine is stored at {path}{_others(path)}; {REMEDY}"
        )
    measured_for = _measured_for(_report_path(path))
    if measured_for is None or not path.stem.endswith(f"-{identity_key(measured_for)}"):
        raise InputError(f"profile {path} was not measured for this model, machine and fleet; delete it and {REMEDY}")
    return read_profile(path)


def read_report(path: Path) -> dict[str, Any]:
    """The report of a stored profile, as `report` made it."""
    content: dict[str, Any] = json.loads(_report_path(path).read_text(encoding="utf-8"))
    return content


def _report_path(path: Path) -> Path:
    return path.with_suffix(".report.json")


def _measured_for(path: Path) -> dict[str, object] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))["measured_for"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return content if isinstance(content, dict) else None


def _others(path: Path) -> str:
    """What the profiles beside a missing one were measured on."""
    found = [_measured_for(report) for report in sorted(path.parent.glob("*.report.json"))]
    shown = [
        f"{entry['hardware']}, {entry['num_cores'] or 'all'} cores, {entry['num_ranks']} ranks, {entry['dtype']}, "
        f"{'/'.join(entry['target_modules'])}, {ActivationPolicy(**entry.get('activations', {}))}"
        for entry in found
        if entry
    ]
    return f" (there are: {'; '.join(shown)})" if shown else ""
