"""Several tenants' adapters in one forward pass: a wrapper around a frozen Megatron linear layer.

    y = W x + s_t B_t A_t x     for the tokens of tenant t, t = 1..N in one micro-batch

Tokens of one tenant lie next to each other, so the input is split into one span per tenant (`torch.split`: its backward
is one concatenation; slices would cost O(N) full-size additions, and a dense mask would let one tenant's NaN reach the
others as 0 * NaN). A Megatron layer fuses q, k, v (or gate, up); the fused A stacks their rows and the fused B is block
diagonal with rows in Megatron's order, so that a tenant costs two matrix products per fused layer.

Tensor parallelism: column layers all-reduce the gradient of A x (rank wide) in backward, row layers all-reduce A x in
forward; one call per layer for all tenants together.

Not here: sequence parallelism, dropout.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from data_prep.collate import TenantSpan
from training.adapters import Adapter
from training.base_model import BaseModel

FUSED_TARGETS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


@dataclass(frozen=True, slots=True)
class Spans:
    """Which entries of hidden_TBD along `dim` belong to which tenant: adjacent and complete.

    A padded chunk has spans of rows (dim 1, B), a packed one of tokens (dim 0, T).
    """

    dim: int
    items: tuple[TenantSpan, ...]


@dataclass(frozen=True)
class FusedLayer:
    """Which fused Megatron layer a wrapper stands for: its kind (a key of FUSED_TARGETS), layer number and group."""

    kind: str
    layer: int
    base: BaseModel
    tp_group: dist.ProcessGroup

    @property
    def targets(self) -> tuple[str, ...]:
        return FUSED_TARGETS[self.kind]

    @property
    def row_parallel(self) -> bool:
        return self.kind in ("linear_proj", "linear_fc2")

    @property
    def tp(self) -> int:
        return self.tp_group.size()


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


def _all_reduce_together(tensors, shapes, group) -> list[Tensor]:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    sizes = [shape.numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


class MultiLoraLinear(nn.Module):
    """Wraps one frozen column- or row-parallel layer. `spans` is set before every forward of its transformer layer."""

    def __init__(self, frozen: nn.Module, place: FusedLayer, adapters: dict[str, Adapter]) -> None:
        super().__init__()
        self.frozen = frozen
        self.place = place
        self.adapters = adapters
        self.spans: Spans | None = None

    @property
    def weight(self) -> Tensor:
        return self.frozen.weight

    def forward(self, hidden: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
        """hidden_TBD -> (output_TBO, bias). Extra arguments are the frozen layer's own."""
        output, bias = self.frozen(hidden, *args, **kwargs)
        spans = self.spans
        if spans is None:
            raise RuntimeError("MultiLoraLinear was called without spans; chunks travel as LoraChunkParams")
        fused = [self._fused_pair(span.tenant) for span in spans.items]
        if not any(fused):
            return output, bias
        parts = hidden.split([span.size for span in spans.items], spans.dim)
        active = [index for index, pair in enumerate(fused) if pair is not None]
        lows = [F.linear(parts[index], fused[index][0].to(hidden.dtype)) for index in active]
        if self.place.tp > 1:
            reduce = _ReduceFromTensorParallel if self.place.row_parallel else _CopyToTensorParallel
            lows = reduce.apply(self.place.tp_group, *lows)
        updates = {
            index: F.linear(low, fused[index][1].to(hidden.dtype)) for index, low in zip(active, lows, strict=True)
        }
        whole = [
            updates[index] if index in updates else part.new_zeros(*part.shape[:-1], output.shape[-1])
            for index, part in enumerate(parts)
        ]
        return output + torch.cat(whole, spans.dim), bias

    def _fused_pair(self, tenant: str) -> tuple[Tensor, Tensor] | None:
        """Fused (A [R, in], scaled B [out, R]) of a tenant in this layer; None if its adapter has no part in it."""
        adapter = self.adapters.get(tenant)
        if adapter is None:
            return None
        pairs = {target: adapter.pair(self.place.layer, target) for target in self.place.targets}
        pairs = {target: pair for target, pair in pairs.items() if pair is not None}
        if not pairs:
            return None
        matrices_a = [pair[0] for pair in pairs.values()]
        matrix_a = matrices_a[0].t() if self.place.row_parallel else torch.cat(matrices_a)
        matrix_b = self._block_diagonal({target: pair[1] for target, pair in pairs.items()})
        return matrix_a, matrix_b * adapter.config.scale

    def _block_diagonal(self, matrices_b: dict[str, Tensor]) -> Tensor:
        """B of each target -> one [fused out, sum of ranks], rows in Megatron's order.

        qkv: per kv group its query heads, then its key head, then its value head. fc1: all gate rows, then all up rows.
        """
        place = self.place
        if len(place.targets) == 1:
            return matrices_b[place.targets[0]]
        num_groups = place.base.num_kv_heads // place.tp if place.kind == "linear_qkv" else 1
        total_rank = sum(matrix.shape[1] for matrix in matrices_b.values())
        blocks, column = [], 0
        for target in place.targets:
            rows = place.base.target_shape(target).num_out // place.tp // num_groups
            matrix = matrices_b.get(target)
            if matrix is None:
                blocks.append(next(iter(matrices_b.values())).new_zeros(num_groups, rows, total_rank))
                continue
            rank = matrix.shape[1]
            blocks.append(F.pad(matrix.view(num_groups, rows, rank), (column, total_rank - column - rank)))
            column += rank
        return torch.cat(blocks, 1).flatten(0, 1)
