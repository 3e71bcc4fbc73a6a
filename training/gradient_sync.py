"""Sums adapter gradients over unequal replicas.

Ranks that hold the same slices (see `layout.reduction_sets`) share one process group and one flat buffer, so a step
costs one all-reduce per set. Tensors replicated over tensor parallelism have the same gradient on every
tensor-parallel rank, of which only rank 0 contributes; with sequence parallelism each rank has that of its own tokens,
and all contribute. Groups depend on the layout alone, never on tenants or on how many chunks a replica had: no rank can
wait for one that has nothing to do.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from training.adapters import Adapter
from training.layout import REPLICATED, SliceKey, Stage


class GradientSync:
    """Construction is collective over the world; a call is collective over the world, in the order of the sets."""

    def __init__(self, stage: Stage, adapters: dict[str, Adapter]) -> None:
        self.stage = stage
        self.adapters = adapters
        self._sets: list[tuple[dist.ProcessGroup, dict[str, list[Tensor]]]] = []
        for ranks, keys in stage.layout.reduction_sets.items():
            if len(ranks) == 1:
                continue
            group = dist.new_group(list(ranks))
            if stage.rank in ranks:
                slices = {tenant: _slices(adapter, set(keys)) for tenant, adapter in adapters.items()}
                self._sets.append((group, slices))

    @torch.no_grad()
    def __call__(self, tenants: Sequence[str]) -> None:
        """Sum the gradients of `tenants` (the same sorted names on every rank) in place; absent ones are zero."""
        if not self.contributes_replicated:
            for tenant in tenants:
                adapter = self.adapters[tenant]
                adapter.gradient[: adapter.num_replicated].zero_()
        for group, slices in self._sets:
            own = [part for tenant in tenants for part in slices[tenant]]
            if own:
                flat = torch.cat(own)
                dist.all_reduce(flat, group=group)
                torch._foreach_copy_(own, list(flat.split([part.numel() for part in own])))

    @property
    def contributes_replicated(self) -> bool:
        """Whether this rank's gradients of replicated tensors count: unless its tensor-parallel peers have the same."""
        return self.stage.tp_rank == 0 or self.stage.splits_tokens


def _slices(adapter: Adapter, keys: set[SliceKey]) -> list[Tensor]:
    """Views of an adapter's gradient that hold its slices in one set, in the order that every holder shares."""
    stage = adapter.stage
    parts = stage.layout.parts_of(stage.position)
    ranges: list[list[int]] = []
    for key, (offset, size) in adapter.ranges.items():
        is_split = adapter.place(key).is_split
        own = size // len(parts) if is_split else size
        for index, part in enumerate(parts if is_split else (REPLICATED,)):
            if SliceKey(key.layer, part) not in keys:
                continue
            start = offset + index * own
            if ranges and sum(ranges[-1]) == start:
                ranges[-1][1] += own
            else:
                ranges.append([start, own])
    return [adapter.gradient.narrow(0, start, size) for start, size in ranges]
