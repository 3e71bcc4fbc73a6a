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

from collections.abc import Sequence
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


class _CopyToTensorParallel(torch.autograd.Function):
    """Identity; backward all-reduces the gradients of all inputs in one flat call over the tensor-parallel group."""

    @staticmethod
    def forward(ctx, group, *inputs):
        ctx.group = group
        ctx.shapes = [x.shape for x in inputs]
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx, *gradients):
        return None, *_all_reduce_together(gradients, ctx.shapes, ctx.group)


class _ReduceFromTensorParallel(torch.autograd.Function):
    """All-reduces all inputs in one flat call over the tensor-parallel group; backward is the identity."""

    @staticmethod
    def forward(ctx, group, *inputs):
        return tuple(_all_reduce_together(inputs, [x.shape for x in inputs], group))

    @staticmethod
    def backward(ctx, *gradients):
        return None, *gradients


class _GatherTokens(torch.autograd.Function):
    """[T/tp, B, r] -> [T, B, r] of all ranks' tokens; backward sums and scatters."""

    @staticmethod
    def forward(ctx, group, own):
        ctx.group = group
        return _gather_tokens(own, group)

    @staticmethod
    def backward(ctx, gradient):
        return None, _scatter_sum(gradient, ctx.group)


class _ScatterTokens(torch.autograd.Function):
    """Partial [T, B, r] -> their sum over the ranks, own tokens [T/tp, B, r]; backward gathers."""

    @staticmethod
    def forward(ctx, group, partial):
        ctx.group = group
        return _scatter_sum(partial, group)

    @staticmethod
    def backward(ctx, gradient):
        return None, _gather_tokens(gradient, ctx.group)


def _all_reduce_together(tensors, shapes, group) -> list[Tensor]:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    sizes = [shape.numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def _gather_tokens(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = own.new_empty(own.shape[0] * group.size(), *own.shape[1:])
    dist.all_gather_into_tensor(whole, own.contiguous(), group=group)
    return whole


def _scatter_sum(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    own = partial.new_empty(partial.shape[0] // group.size(), *partial.shape[1:])
    dist.reduce_scatter_tensor(own, partial.contiguous(), group=group)
    return own


@dataclass(frozen=True)
class LowRankExchange:
    """How the tensor-parallel ranks of one wrapped layer exchange A x. Collective over `group`, same tenants on all."""

    group: dist.ProcessGroup
    row_parallel: bool
    sequence_parallel: bool

    def sizes(self, spans: Spans) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of the tenants' parts of what enters the layer, and of what leaves it."""
        return (spans.sizes, spans.own_sizes) if self.row_parallel else (spans.own_sizes, spans.sizes)

    def __call__(self, lows: dict[int, Tensor], spans: Spans) -> dict[int, Tensor]:
        """A x per index of `spans` as it enters the layer -> whole A x as it leaves it."""
        if self.group.size() == 1:
            return lows
        if self.sequence_parallel:
            return self._move_tokens(lows, spans)
        reduce = _ReduceFromTensorParallel if self.row_parallel else _CopyToTensorParallel
        return dict(zip(lows, reduce.apply(self.group, *lows.values()), strict=True))

    def _move_tokens(self, lows: dict[int, Tensor], spans: Spans) -> dict[int, Tensor]:
        """All tenants side by side in one tensor as wide as the widest, so that every rank's part has one shape."""
        sizes_in, sizes_out = self.sizes(spans)
        widest = max(low.shape[-1] for low in lows.values())
        some = next(iter(lows.values()))
        parts = []
        for index, size in enumerate(sizes_in):
            shape = [size if dim == spans.dim else n for dim, n in enumerate(some.shape[:-1])]
            low = lows[index] if index in lows else some.new_zeros(*shape, widest)
            parts.append(F.pad(low, (0, widest - low.shape[-1])))
        move = _ScatterTokens if self.row_parallel else _GatherTokens
        moved = move.apply(self.group, torch.cat(parts, spans.dim)).split(sizes_out, spans.dim)
        return {index: moved[index][..., : low.shape[-1]] for index, low in lows.items()}
