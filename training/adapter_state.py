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
from training.checkpoint import CheckpointError, adapter_file, optimiser_file
from training.config import TenantConfig
from training.layout import RankPosition, Stage
from training.optimiser import MOMENTS, TenantOptimiser

KINDS = ("weight", *MOMENTS)


class CanonicalWriter:
    """Collects canonical tensors on rank 0. Only ranks of replica 0 take part; `control_group` is the gloo world."""

    def __init__(self, stage: Stage, control_group: dist.ProcessGroup) -> None:
        self.stage = stage
        self.control_group = control_group

    @torch.no_grad()
    def write(self, folder: Path, optimisers: dict[str, TenantOptimiser]) -> None:
        """Write adapters and moments of all tenants below `folder` (rank 0); others of replica 0 send theirs."""
        if self.stage.position.replica.index != 0:
            return
        for tenant in sorted(optimisers):
            tensors = self.collect(optimisers[tenant])
            if tensors is None:
                continue
            name = folder_name(tenant)
            weights = {key.peft_name: tensor for (key, kind), tensor in tensors.items() if kind == "weight"}
            moments = {f"{kind}.{key.peft_name}": tensor for (key, kind), tensor in tensors.items() if kind != "weight"}
            save_file(weights, adapter_file(folder, name), metadata={"format": "pt"})
            save_file(moments, optimiser_file(folder, name), metadata={"format": "pt"})

    def collect(self, optimiser: TenantOptimiser) -> dict[tuple[TensorKey, str], Tensor] | None:
        """Canonical tensors of one tenant on rank 0, None elsewhere. Collective over replica 0."""
        replica = self.stage.position.replica
        mine = self._owned(optimiser)
        if self.stage.rank != 0:
            if mine:
                dist.send(torch.cat([tensor.reshape(-1) for tensor in mine.values()]), 0, group=self.control_group)
            return None
        shards: dict[tuple[TensorKey, str], list[Tensor]] = {}
        for rank in replica.ranks:  # tensor-parallel rank fastest, so shards arrive in order
            owned = mine if rank == 0 else self._receive(optimiser.adapter, self.stage.layout.position(rank))
            for item, tensor in owned.items():
                shards.setdefault(item, []).append(tensor)
        return {(key, kind): optimiser.adapter.place(key).to_canonical(parts) for (key, kind), parts in shards.items()}

    def _owned(self, optimiser: TenantOptimiser) -> dict[tuple[TensorKey, str], Tensor]:
        owned = {}
        for key, parameter in optimiser.adapter.parameters.items():
            if optimiser.adapter.place(key).is_split or self.stage.tp_rank == 0:
                values = {"weight": parameter.detach(), **optimiser.moments(key)}
                owned.update({(key, kind): values[kind].cpu() for kind in KINDS})
        return owned

    def _receive(self, adapter: Adapter, sender: RankPosition) -> dict[tuple[TensorKey, str], Tensor]:
        shapes = {}
        for key in tensor_keys(adapter.config, self.stage.layout.stage_layers(sender.replica, sender.pp_rank)):
            place = adapter.place(key)
            if place.is_split or sender.tp_rank == 0:
                rows, columns = place.stored_shape
                local = (rows // sender.replica.config.tp, columns) if place.is_split else (rows, columns)
                shapes.update({(key, kind): torch.Size(local) for kind in KINDS})
        if not shapes:
            return {}
        flat = torch.empty(sum(shape.numel() for shape in shapes.values()))
        source = sender.replica.first_rank + sender.pp_rank * sender.replica.config.tp + sender.tp_rank
        dist.recv(flat, source, group=self.control_group)
        parts = flat.split([shape.numel() for shape in shapes.values()])
        return {item: part.view(shape) for (item, shape), part in zip(shapes.items(), parts, strict=True)}


def load_tenant(checkpoint: Path, tenant: TenantConfig, num_updates: int, stage: Stage) -> TenantOptimiser:
    """One tenant's adapter and moments from a checkpoint, as this rank holds them.

    Raises CheckpointError when a tensor is missing or of another shape: the checkpoint is of another run.
    """
    name = folder_name(tenant.name)
    with safe_open(adapter_file(checkpoint, name), framework="pt") as weights:
        adapter = Adapter(tenant.name, tenant.adapter, stage, _reader(weights, tenant, stage.base, ""))
    optimiser = TenantOptimiser(adapter, tenant.optimiser)
    with safe_open(optimiser_file(checkpoint, name), framework="pt") as moments:
        readers = {kind: _reader(moments, tenant, stage.base, f"{kind}.") for kind in MOMENTS}
        if num_updates:
            for key in adapter.parameters:
                place = adapter.place(key)
                local = {kind: place.to_local(read(key), stage.tp, stage.tp_rank) for kind, read in readers.items()}
                optimiser.restore(key, local, num_updates)
    return optimiser


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
