"""A base model with one adapter merged into it: a Hugging Face folder that needs no peft.

    W' = W + (alpha / rank) B A      in float32, rounded once to the number format that W is stored in

The base's files are copied, and the adapter's targets then overwritten in the copy, where they lie: names, shards and
formats stay the base's, tied embeddings stay tied, and one tensor is in memory at a time. The fleet adds the adapter's
output to that of W instead, so for a 16-bit base the logits differ from the adapter's by the rounding of W'.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from data_prep.files import create_folder
from data_prep.names import folder_name
from training.base_model import BaseModel, module_name, peft_name
from training.checkpoint import Checkpoint, published_file
from training.config import TenantConfig
from training.peft_export import ExportError, check_trained
from training.weights import is_finite

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
LENGTH_BYTES = 8  # a safetensors file begins with the length of its JSON header


@dataclass(frozen=True, slots=True)
class Target:
    """One projection that the adapter changes."""

    layer: int
    name: str

    @property
    def tensor_name(self) -> str:
        return f"{module_name(self.layer, self.name)}.weight"


def merge(checkpoint: Checkpoint, base: BaseModel, tenant: TenantConfig, folder: Path) -> None:
    """Write the merged model to `folder`, whole or not at all.

    Raises ExportError when the adapter is not finite or never moved, or a merged weight leaves the base's number
    format; InputError when `folder` holds anything.
    """
    check_trained(checkpoint, tenant)
    targets = [Target(layer, name) for layer in range(base.num_layers) for name in tenant.adapter.target_modules]
    shards = sorted(set(base.tensor_files.values()))
    with (
        create_folder(folder) as partial,
        safe_open(published_file(checkpoint.folder, folder_name(tenant.name)), framework="pt") as adapter,
    ):

        def update(target: Target) -> Tensor:
            matrix_a, matrix_b = (adapter.get_tensor(peft_name(target.layer, target.name, which)) for which in "AB")
            return tenant.adapter.scale * (matrix_b @ matrix_a)

        for path in (*_other_files(base.folder), *shards):
            shutil.copyfile(path, partial / path.name)
        for shard in shards:
            inside = [target for target in targets if base.tensor_files[target.tensor_name] == shard]
            _merge_shard(shard, partial / shard.name, inside, update)


def _merge_shard(shard: Path, copy: Path, targets: Sequence[Target], update: Callable[[Target], Tensor]) -> None:
    offsets = _offsets(shard)
    with safe_open(shard, framework="pt") as weights, copy.open("r+b") as file:
        for target in targets:
            weight = weights.get_tensor(target.tensor_name)
            merged = (weight.float() + update(target)).to(weight.dtype)
            if not is_finite(merged):
                raise ExportError(f"{shard}: merged, {target.tensor_name} leaves the range of {weight.dtype}")
            file.seek(offsets[target.tensor_name])
            file.write(merged.view(torch.uint8).numpy())


def _other_files(folder: Path) -> Iterator[Path]:
    """config.json, tokenizer, index: the plain files of a model folder that hold no weights."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHT_SUFFIXES):
            yield path


def _offsets(path: Path) -> dict[str, int]:
    """Where each tensor of a safetensors file begins, in bytes from the start of the file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: LENGTH_BYTES + size + entry["data_offsets"][0] for name, entry in header.items()}
