"""Adapters and moments between the ranks' local slices and canonical files, for any layout on either side.

Writing: replica 0 alone holds everything, on the lowest ranks of the world; each of its ranks sends what it owns to
rank 0 in one flat float32 buffer per tenant (tensors replicated over tensor parallelism come from tensor-parallel rank
0). Reading: every rank takes its own slices from the files.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from data_prep.names import folder_name
from training.adapters import Adapter, TensorKey, tensor_keys, tensor_place
from training.base_model import BaseModel
from training.checkpoint import CheckpointError, adapter_file, best_file, optimiser_file
from training.config import TenantConfig
from training.layout import Stage
from training.optimiser import MOMENTS, TenantOptimiser

WEIGHT, BEST = "weight", "best"
Item = tuple[TensorKey, str]  # a tensor, and whether it is the weight, a moment, or the best weight
Snapshot = dict[str, dict[Item, Tensor]]  # tenant -> what a rank owns of its adapter and moments


@torch.no_grad()
def take_snapshot(optimisers: dict[str, TenantOptimiser], stage: Stage) -> Snapshot:
    """Copies (on the CPU) of the tensors that this rank owns; nothing on ranks outside replica 0."""
    if stage.position.replica.index != 0:
        return {}
    return {tenant: _owned(optimiser, stage) for tenant, optimiser in sorted(optimisers.items())}


def _owned(optimiser: TenantOptimiser, stage: Stage) -> dict[Item, Tensor]:
    adapter, owned = optimiser.adapter, {}
    values = {WEIGHT: adapter.parameters, **optimiser.moments()}
    for key in adapter.parameters:
        if adapter.place(key).is_split or stage.tp_rank == 0:
            owned.update({(key, kind): tensors[key].to("cpu", copy=True) for kind, tensors in values.items()})
            if adapter.best:
                owned[key, BEST] = adapter.best[key]
    return owned


class CanonicalWriter:
    """Collects canonical tensors on rank 0. Only ranks of replica 0 take part, over a gloo group of the world."""

    def __init__(self, stage: Stage, adapters: dict[str, Adapter], group: dist.ProcessGroup) -> None:
        self.stage = stage
        self.adapters = adapters
        self.group = group

    def write(self, folder: Path, snapshot: Snapshot) -> bool:
        """Write all tenants below `folder` on rank 0 (returns True there); other ranks of replica 0 send theirs."""
        for tenant, mine in snapshot.items():
            tensors = self.collect(tenant, mine)
            if tensors is None:
                continue
            name = folder_name(tenant)
            moments = {f"{kind}.{key.peft_name}": tensor for (key, kind), tensor in tensors.items() if kind in MOMENTS}
            save_file(_of_kind(tensors, WEIGHT), adapter_file(folder, name), metadata={"format": "pt"})
            save_file(moments, optimiser_file(folder, name), metadata={"format": "pt"})
            if best := _of_kind(tensors, BEST):
                save_file(best, best_file(folder, name), metadata={"format": "pt"})
        return self.stage.rank == 0

    def collect(self, tenant: str, mine: dict[Item, Tensor]) -> dict[Item, Tensor] | None:
        """Canonical tensors of one tenant on rank 0, None elsewhere. Collective over replica 0."""
        if self.stage.rank != 0:
            if mine:
                dist.send(torch.cat([tensor.reshape(-1) for tensor in mine.values()]), 0, group=self.group)
            return None
        adapter = self.adapters[tenant]
        kinds = tuple(dict.fromkeys(kind for _, kind in mine))  # the same on all ranks of replica 0
        shards: dict[Item, list[Tensor]] = {}
        for rank in self.stage.position.replica.ranks:  # tensor-parallel rank fastest, so shards arrive in order
            owned = mine if rank == 0 else self._receive(adapter, rank, kinds)
            for item, tensor in owned.items():
                shards.setdefault(item, []).append(tensor)
        return {(key, kind): adapter.place(key).to_canonical(parts) for (key, kind), parts in shards.items()}

    def _receive(self, adapter: Adapter, rank: int, kinds: tuple[str, ...]) -> dict[Item, Tensor]:
        sender = self.stage.layout.position(rank)
        shapes = {}
        for key in tensor_keys(adapter.config, self.stage.layout.stage_layers(sender.replica, sender.pp_rank)):
            place = adapter.place(key)
            if place.is_split or sender.tp_rank == 0:
                local = place.local_shape(sender.replica.config.tp)
                shapes.update({(key, kind): torch.Size(local) for kind in kinds})
        if not shapes:
            return {}
        flat = torch.empty(sum(shape.numel() for shape in shapes.values()))
        dist.recv(flat, rank, group=self.group)
        parts = flat.split([shape.numel() for shape in shapes.values()])
        return {item: part.view(shape) for (item, shape), part in zip(shapes.items(), parts, strict=True)}


def _of_kind(tensors: dict[Item, Tensor], wanted: str) -> dict[str, Tensor]:
    return {key.peft_name: tensor for (key, kind), tensor in tensors.items() if kind == wanted}


def load_tenant(checkpoint: Path, tenant: TenantConfig, num_updates: int, stage: Stage) -> TenantOptimiser:
    """One tenant's adapter and moments from a checkpoint, as this rank holds them.

    Raises CheckpointError when a tensor is missing or of another shape: the checkpoint is of another run.
    """
    name = folder_name(tenant.name)
    with safe_open(adapter_file(checkpoint, name), framework="pt") as weights:
        adapter = Adapter(tenant.name, tenant.adapter, stage, _reader(weights, tenant, stage.base, ""))
    optimiser = TenantOptimiser(adapter, tenant.optimiser)
    if num_updates:
        with safe_open(optimiser_file(checkpoint, name), framework="pt") as moments:
            optimiser.restore(
                {kind: _local(adapter, _reader(moments, tenant, stage.base, f"{kind}.")) for kind in MOMENTS},
                num_updates,
            )
    if stage.position.replica.index == 0 and best_file(checkpoint, name).exists():
        with safe_open(best_file(checkpoint, name), framework="pt") as best:
            adapter.best = _local(adapter, _reader(best, tenant, stage.base, ""))
    return optimiser


def _local(adapter: Adapter, canonical: Callable[[TensorKey], Tensor]) -> dict[TensorKey, Tensor]:
    stage = adapter.stage
    return {key: adapter.place(key).to_local(canonical(key), stage.tp, stage.tp_rank) for key in adapter.parameters}


def _reader(file, tenant: TenantConfig, base: BaseModel, prefix: str) -> Callable[[TensorKey], Tensor]:
    names = set(file.keys())

    def read(key: TensorKey) -> Tensor:
        name = prefix + key.peft_name
        if name not in names:
            raise CheckpointError(f"checkpoint has no tensor {name} of tenant {tenant.name!r}")
        tensor = file.get_tensor(name)
        expected = tensor_place(base, tenant.adapter, key).shape
        if tuple(tensor.shape) != expected:
            raise CheckpointError(f"{name} of tenant {tenant.name!r} has shape {tuple(tensor.shape)}, not {expected}")
        return tensor

    return read
