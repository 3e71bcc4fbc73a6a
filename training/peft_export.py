"""A tenant's adapter in a checkpoint -> the folder that `peft.PeftModel.from_pretrained` loads. No torch.

Checkpoints hold adapters in canonical shapes under peft's names already, so the export is a verified copy beside an
adapter_config.json; any layout that trained it gives the same bytes.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from data_prep.files import sync_to_disk
from data_prep.names import folder_name
from planning.errors import LobraError
from training.checkpoint import Checkpoint, published_file
from training.config import BaseModelConfig, TenantConfig

WEIGHTS = "adapter_model.safetensors"


class ExportError(LobraError):
    """An adapter must not be published."""


def export_adapter(checkpoint: Checkpoint, base_model: BaseModelConfig, tenant: TenantConfig, folder: Path) -> Path:
    """Write adapter_config.json and adapter_model.safetensors to `folder`, whole or not at all.

    Raises ExportError as `check_trained` does.
    """
    check_trained(checkpoint, tenant)
    source = published_file(checkpoint.folder, folder_name(tenant.name))
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shutil.copyfile(source, partial / WEIGHTS)
    (partial / "adapter_config.json").write_text(json.dumps(peft_config(base_model, tenant), indent=2, sort_keys=True))
    for path in (*partial.iterdir(), partial):
        sync_to_disk(path)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    sync_to_disk(folder.parent)
    return folder


def check_trained(checkpoint: Checkpoint, tenant: TenantConfig) -> None:
    """Raise ExportError when the adapter has a non-finite value or never moved from its start.

    A new adapter starts with every B zero; one that continues another is judged by its number of updates.
    """
    tensors = load_file(published_file(checkpoint.folder, folder_name(tenant.name)))
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise ExportError(f"adapter of tenant {tenant.name!r} has a non-finite value in {name}")
    if not any(tensor.any() for name, tensor in tensors.items() if ".lora_B." in name):
        raise ExportError(f"adapter of tenant {tenant.name!r} never moved: every B is zero")
    if tenant.adapter.initial_adapter is not None and not checkpoint.state["tenants"][tenant.name]["num_updates"]:
        raise ExportError(f"adapter of tenant {tenant.name!r} never moved: no update was made")


def peft_config(base_model: BaseModelConfig, tenant: TenantConfig) -> dict:
    """Content of adapter_config.json: plain LoRA, fixed rank and alpha, no dropout, no bias."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_model.path),
        "r": tenant.adapter.rank,
        "lora_alpha": tenant.adapter.alpha,
        "target_modules": list(tenant.adapter.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_dora": False,
        "use_rslora": False,
    }
