"""From a checkpoint to a published adapter: export aside, probe, move to the run's adapters, note the result.

A folder below `adapters/` is a probed one, at any time. `published/<tenant>.json` says what its probe found and of
which bytes, so that an adapter which was published while others trained is not published twice. No Prefect here.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event

from data_prep.files import file_sha256, sync_to_disk
from data_prep.names import folder_name
from tasks.run_folder import RunFolder, read_json, write_json
from training.adapter_probe import ProbeResult, probe_adapters, probe_item
from training.base_model import read_base_model
from training.checkpoint import Checkpoint, published_file
from training.config import BaseModelConfig, TenantConfig
from training.peft_export import WEIGHTS, export_adapter


@dataclass(frozen=True, slots=True)
class StagedAdapter:
    """An exported adapter that awaits its probe, and its tensors in a copy that outlives the checkpoint."""

    tenant: TenantConfig
    exported: Path
    weights: Path


def stage_adapter(
    tenant: TenantConfig, checkpoint: Checkpoint, base_model: BaseModelConfig, folder: RunFolder
) -> StagedAdapter:
    """Export a tenant's adapter aside. Raises ExportError when it must not be published."""
    folder.staging.mkdir(exist_ok=True)
    exported = folder.staging / folder_name(tenant.name)
    export_adapter(checkpoint, base_model, tenant, exported)
    weights = exported.with_name(f"{exported.name}.safetensors")
    shutil.copyfile(published_file(checkpoint.folder, exported.name), weights)
    return StagedAdapter(tenant, exported, weights)


def publish_staged(
    staged: Sequence[StagedAdapter], base_model: BaseModelConfig, folder: RunFolder, stop: Event | None = None
) -> dict[str, ProbeResult]:
    """Probe the adapters in one process and publish those that pass; every tenant's result. `stop` ends the probe."""
    num_layers = read_base_model(base_model).num_layers
    items = [probe_item(one.exported, one.weights, one.tenant, num_layers) for one in staged]
    results = probe_adapters(base_model, items, stop)
    for one, result in zip(staged, results, strict=True):
        if result.has_passed:
            _publish(one, result, folder)
        else:
            shutil.rmtree(one.exported)
        one.weights.unlink()
    return {one.tenant.name: result for one, result in zip(staged, results, strict=True)}


def published_probe(tenant: str, checkpoint: Checkpoint, folder: RunFolder) -> ProbeResult | None:
    """What the probe of a tenant's published adapter found; None unless it is the one that is to be published."""
    record, weights = folder.publication(tenant), folder.adapter(tenant) / WEIGHTS
    if not record.exists() or not weights.exists():
        return None
    content = read_json(record)
    wanted = file_sha256(published_file(checkpoint.folder, folder_name(tenant)))
    if not content["sha256"] == wanted == file_sha256(weights):
        return None
    return ProbeResult(**content["probe"])


def _publish(one: StagedAdapter, result: ProbeResult, folder: RunFolder) -> None:
    name = one.tenant.name
    target, record = folder.adapter(name), folder.publication(name)
    target.parent.mkdir(exist_ok=True)
    record.parent.mkdir(exist_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(one.exported, target)
    sync_to_disk(target.parent)
    content = {"tenant": name, "sha256": file_sha256(target / WEIGHTS), "probe": asdict(result)}
    write_json(record, {"schema_version": 1, **content})
