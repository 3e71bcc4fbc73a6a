"""An existing PEFT adapter that a tenant continues from: judged before anything is built on it. No torch.

It must be plain LoRA of the tenant's own rank, alpha and target modules, in safetensors. Its lora_dropout is passed
over: training here has none. Compared with the base model are the last parts of two names, that of
`base_model_name_or_path` and that of `base_model.path`, so `meta-llama/Llama-3.1-8B` fits `/models/Llama-3.1-8B`; an
adapter that names no base model is judged by its tensors alone.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from planning.errors import InputError
from training.base_model import BaseModel, peft_name
from training.config import AdapterConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
# What these keys of adapter_config.json may be beside absent, null or empty.
PLAIN_LORA = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Other initialisations change the base model's weights, and their adapters belong to the changed ones.
    "init_lora_weights": (True, False, "gaussian"),
} | dict.fromkeys(
    (
        "use_dora",
        "use_rslora",
        "modules_to_save",
        "rank_pattern",
        "alpha_pattern",
        "lora_bias",
        "fan_in_fan_out",
        "layers_to_transform",
        "layer_replication",
        "target_parameters",
        "trainable_token_indices",
        "use_qalora",
        "alora_invocation_tokens",
        "use_bdlora",
    ),
    (False,),
)


class InitialAdapterError(InputError):
    """A tenant cannot continue from the adapter that it names."""


def check_initial_adapter(tenant: str, adapter: AdapterConfig, base: BaseModel) -> None:
    """Raise InitialAdapterError, which names what differs, unless training can continue from `initial_adapter`."""
    folder = adapter.initial_adapter
    assert folder is not None
    where = f"tenant {tenant!r}: adapter.initial_adapter {folder}"
    if not folder.is_dir():
        raise InitialAdapterError(f"{where}: no such folder; give one with {CONFIG_FILE} and {WEIGHTS_FILE}")
    _check_config(where, _read_config(where, folder / CONFIG_FILE), adapter, base)
    _check_tensors(where, _read_tensors(where, folder), adapter, base)


def _read_config(where: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InitialAdapterError(f"{where}: {CONFIG_FILE} is missing; give a folder that peft saved") from error
    except (OSError, ValueError) as error:
        raise InitialAdapterError(f"{where}: {CONFIG_FILE} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InitialAdapterError(f"{where}: {CONFIG_FILE} is no JSON object; give a folder that peft saved")
    return content


def _check_config(where: str, config: dict[str, Any], adapter: AdapterConfig, base: BaseModel) -> None:
    for key, allowed in PLAIN_LORA.items():
        value = config.get(key)
        if value and value not in allowed:
            raise InitialAdapterError(f"{where}: {key} is {value!r}, which is not supported; only plain LoRA is")
    for key, name, own in (("r", "rank", adapter.rank), ("lora_alpha", "alpha", adapter.alpha)):
        if config.get(key) != own:
            raise InitialAdapterError(
                f"{where}: its {key} is {config.get(key)}, but adapter.{name} is {own:g}; set adapter.{name} to it"
            )
    targets = config.get("target_modules")
    if isinstance(targets, list):  # a pattern is judged by the tensors that it led to
        found = {str(target).rpartition(".")[2] for target in targets}
        if found != set(adapter.target_modules):
            raise InitialAdapterError(
                f"{where}: its target_modules are {', '.join(sorted(found))}, but adapter.target_modules are "
                f"{', '.join(sorted(adapter.target_modules))}; set adapter.target_modules to them"
            )
    named, own_path = config.get("base_model_name_or_path"), base.folder
    if named and Path(named).name != Path(os.path.abspath(own_path)).name:
        raise InitialAdapterError(
            f"{where}: it belongs to the base model {named}, but base_model.path is {own_path}; give its own base "
            f"model, or, if both are the same, correct base_model_name_or_path in its {CONFIG_FILE}"
        )


def _read_tensors(where: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> {dtype, shape, data} of every tensor."""
    path = folder / WEIGHTS_FILE
    try:
        return dict(deserialize(path.read_bytes()))
    except FileNotFoundError as error:
        hint = ""
        if (folder / PICKLE_FILE).exists():
            hint = (
                f"; the pickled {PICKLE_FILE} is refused, load it with peft where you trust it and write it anew with "
                "save_pretrained(safe_serialization=True)"
            )
        raise InitialAdapterError(f"{where}: {WEIGHTS_FILE} is missing{hint}") from error
    except (OSError, SafetensorError) as error:
        raise InitialAdapterError(f"{where}: {WEIGHTS_FILE} cannot be read: {error}") from error


def _check_tensors(where: str, tensors: dict[str, dict[str, Any]], adapter: AdapterConfig, base: BaseModel) -> None:
    expected = {}
    for layer in range(base.num_layers):
        for target in adapter.target_modules:
            shape = base.target_shape(target)
            expected[peft_name(layer, target, "A")] = [adapter.rank, shape.num_in]
            expected[peft_name(layer, target, "B")] = [shape.num_out, adapter.rank]
    for kind, names in (("misses", expected.keys() - tensors.keys()), ("has also", tensors.keys() - expected.keys())):
        if names:
            raise InitialAdapterError(
                f"{where}: {WEIGHTS_FILE} {kind} the tensor {min(names)} ({len(names)} in all); it must hold A and B "
                f"of {', '.join(adapter.target_modules)} on all {base.num_layers} layers and nothing else"
            )
    for name, shape in expected.items():
        tensor = tensors[name]
        if tensor["shape"] != shape:
            raise InitialAdapterError(f"{where}: {name} has shape {tensor['shape']}, but the base model needs {shape}")
        values = _floats(tensor["dtype"], tensor["data"])
        if values is None:
            raise InitialAdapterError(f"{where}: {name} is of type {tensor['dtype']}; only F32, F16 and BF16 are read")
        if not np.isfinite(values).all():
            raise InitialAdapterError(f"{where}: {name} has a value that is not finite; continue from an earlier one")


def _floats(dtype: str, data: bytes) -> npt.NDArray[np.floating[Any]] | None:
    """The values of a tensor; NumPy has no bfloat16, which is the upper half of a float32."""
    match dtype:
        case "F32":
            return np.frombuffer(data, "<f4")
        case "F16":
            return np.frombuffer(data, "<f2")
        case "BF16":
            return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        case _:
            return None
