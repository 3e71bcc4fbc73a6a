"""Sums adapter gradients over unequal replicas.

Ranks that hold the same slices (see `layout.reduction_sets`) share one process group and one flat buffer, so a step
costs one all-reduce per set. Tensors replicated over tensor parallelism have the same gradient on every
tensor-parallel rank, of which only rank 0 contributes; with sequence parallelism each rank has that of its own tokens,
and all contribute. Groups depend on the layout alone, never on tenants
or on how many chunks a replica had: no rank can wait for one that has nothing to do.
"""

from collections.abc import Iterator, Sequence

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
        self._sets: list[tuple[dist.ProcessGroup | None, tuple[SliceKey, ...]]] = []
        for ranks, keys in stage.layout.reduction_sets.items():
            group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if stage.rank in ranks:
                self._sets.append((group, keys))

    @torch.no_grad()
    def __call__(self, tenants: Sequence[str]) -> None:
        """Sum the gradients of `tenants` (the same sorted names on every rank) in place; absent ones count as zero."""
        for tenant in tenants:
            for parameter in self.adapters[tenant].parameters.values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        for group, keys in self._sets:
            views = [view for tenant in tenants for view in self._slices(self.adapters[tenant], set(keys))]
            if not views or group is None:
                continue
            flat = torch.cat(views)
            dist.all_reduce(flat, group=group)
            torch._foreach_copy_(views, list(flat.split([view.numel() for view in views])))

    @property
    def contributes_replicated(self) -> bool:
        """Whether this rank's gradients of replicated tensors count: unless its tensor-parallel peers have the same."""
        return self.stage.tp_rank == 0 or self.stage.splits_tokens

    def _slices(self, adapter: Adapter, keys: set[SliceKey]) -> Iterator[Tensor]:
        """Flat gradient views of an adapter's slices in one set, in the order that every holder shares."""
        parts = self.stage.layout.parts_of(self.stage.position)
        for key, parameter in adapter.parameters.items():
            gradient = parameter.grad
            if not adapter.place(key).is_split:
                if SliceKey(key.layer, REPLICATED) in keys:
                    if not self.contributes_replicated:
                        gradient.zero_()
                    yield gradient.view(-1)
                continue
            rows = gradient.view(len(parts), -1)
            for index, part in enumerate(parts):
                if SliceKey(key.layer, part) in keys:
                    yield rows[index]
