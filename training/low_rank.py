"""A x of all tenants of a chunk, made whole over tensor parallelism: one collective per wrapped layer.

    y = W x + s B A x        x [T, in], A [r, in], B [out, r]; T tokens of a chunk, r of some tenant

Column layers (q, k, v, gate, up) split W and B by rows, out / tp on each rank; row layers (o, down) split W and A by
columns, in / tp. With sequence parallelism what enters a column layer and leaves a row layer is split by tokens too:
rank i holds the i-th T/tp tokens. The frozen layer gathers them itself, in full width; the adapter gathers or scatters
A x, which is only r wide.

                          plain                            sequence parallel
    column  x             [T, in], the same on all ranks   [T/tp, in], own tokens
            forward       A x is whole                     all-gather A x over tokens
            backward      all-reduce d(A x)                reduce-scatter d(A x) over tokens
            dA            the same on all ranks            of own tokens: ranks must be summed
            dB            own rows, whole                  own rows, whole
    row     x             [T, in/tp]                       [T, in/tp]
            forward       all-reduce A x                   reduce-scatter A x over tokens
            backward      d(A x) is whole                  all-gather d(A x) over tokens
            dA            own columns, whole               own columns, whole
            dB            the same on all ranks            of own tokens: ranks must be summed

So the replicated matrix (A of column, B of row layers) has equal gradients on all ranks without sequence parallelism,
of which one counts, and partial ones with it, which are summed (`gradient_sync`). Frozen norms need no sync.

Tokens must be a multiple of tp (`data_prep.collate.padded_to_multiple`). A packed chunk's tenants lie along T, so a
rank's tokens hold other parts of them than its peers' do; `Spans` says which.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from data_prep.collate import TenantSpan


@dataclass(frozen=True, slots=True)
class Spans:
    """Whose the entries of hidden_TBD along `dim` are: adjacent and complete.

    A padded chunk has spans of rows (dim 1, B), a packed one of tokens (dim 0, T). `sizes` are those of the whole
    chunk, `own_sizes` those of this rank's tokens: other ones only for a packed chunk under sequence parallelism.
    """

    dim: int
    tenants: tuple[str, ...]
    sizes: tuple[int, ...]
    own_sizes: tuple[int, ...]


def padded_spans(items: Sequence[TenantSpan]) -> Spans:
    """Spans of a padded chunk: every rank has some tokens of every row."""
    sizes = tuple(item.size for item in items)
    return Spans(1, tuple(item.tenant for item in items), sizes, sizes)


def packed_spans(items: Sequence[TenantSpan], num_shards: int, shard: int) -> Spans:
    """Spans of a packed chunk whose tokens are split into `num_shards`, of which this rank holds the `shard`-th."""
    per_shard = (items[-1].start + items[-1].size) // num_shards
    first, last = shard * per_shard, (shard + 1) * per_shard
    own = (min(item.start + item.size, last) - max(item.start, first) for item in items)
    return Spans(
        dim=0,
        tenants=tuple(item.tenant for item in items),
        sizes=tuple(item.size for item in items),
        own_sizes=tuple(max(0, size) for size in own),
    )


@dataclass(frozen=True)
class LowRankExchange:
    """How the tensor-parallel ranks of one wrapped layer exchange A x. Collective over `group`, same tenants on all.

    A x and its gradient are given per index of `spans`, [T, B, r] each.
    """

    group: dist.ProcessGroup
    row_parallel: bool
    sequence_parallel: bool

    def sizes(self, spans: Spans) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of the tenants' parts of what enters the layer, and of what leaves it."""
        return (spans.sizes, spans.own_sizes) if self.row_parallel else (spans.own_sizes, spans.sizes)

    def forward(self, lows: dict[int, Tensor], spans: Spans) -> dict[int, Tensor]:
        """A x as it enters the layer -> whole A x as it leaves it."""
        if self.group.size() == 1:
            return lows
        if self.sequence_parallel:
            return self._move(_scatter_sum if self.row_parallel else _gather, lows, spans, *self.sizes(spans))
        return self._summed(lows) if self.row_parallel else lows

    def backward(self, gradients: dict[int, Tensor], spans: Spans) -> dict[int, Tensor]:
        """d(A x) as it leaves the layer -> d(A x) as it entered."""
        if self.group.size() == 1:
            return gradients
        if self.sequence_parallel:
            sizes_in, sizes_out = self.sizes(spans)
            return self._move(_gather if self.row_parallel else _scatter_sum, gradients, spans, sizes_out, sizes_in)
        return gradients if self.row_parallel else self._summed(gradients)

    def _summed(self, parts: dict[int, Tensor]) -> dict[int, Tensor]:
        flat = torch.cat([part.reshape(-1) for part in parts.values()])
        dist.all_reduce(flat, group=self.group)
        pieces = flat.split([part.numel() for part in parts.values()])
        return {index: piece.view(parts[index].shape) for index, piece in zip(parts, pieces, strict=True)}

    def _move(
        self,
        collective: Callable[[Tensor, dist.ProcessGroup], Tensor],
        parts: dict[int, Tensor],
        spans: Spans,
        sizes_before: tuple[int, ...],
        sizes_after: tuple[int, ...],
    ) -> dict[int, Tensor]:
        """All tenants side by side in one tensor as wide as the widest, so that every rank's part has one shape."""
        widest = max(part.shape[-1] for part in parts.values())
        some = next(iter(parts.values()))
        padded = []
        for index, size in enumerate(sizes_before):
            shape = [size if dim == spans.dim else n for dim, n in enumerate(some.shape[:-1])]
            part = parts[index] if index in parts else some.new_zeros(*shape, widest)
            padded.append(F.pad(part, (0, widest - part.shape[-1])))
        moved = collective(torch.cat(padded, spans.dim), self.group).split(sizes_after, spans.dim)
        return {index: moved[index][..., : part.shape[-1]] for index, part in parts.items()}


def _gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T/tp, B, r] -> [T, B, r] of all ranks' tokens."""
    whole = own.new_empty(own.shape[0] * group.size(), *own.shape[1:])
    dist.all_gather_into_tensor(whole, own, group=group)
    return whole


def _scatter_sum(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Partial [T, B, r] -> their sum over the ranks, own tokens [T/tp, B, r]."""
    own = partial.new_empty(partial.shape[0] // group.size(), *partial.shape[1:])
    dist.reduce_scatter_tensor(own, partial, group=group)
    return own
