"""Several tenants' adapters in one forward pass: a wrapper around a frozen Megatron linear layer.

    y = W x + s_t B_t A_t x     for the tokens of tenant t, t = 1..N in one micro-batch

Tokens of one tenant lie next to each other, so each tenant's product is added in place to its part of W x, and each
tenant's gradients are summed in place into its buffer: no copy of y, no mask (under which one tenant's NaN would reach
the others as 0 * NaN), no autograd graph per tenant. A Megatron layer fuses q, k, v (or gate, up): A x is one product
with the stacked rows of A, B one product per target.

What tensor-parallel ranks exchange, with and without sequence parallelism, is in `low_rank`. Not here: dropout.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.adapters import FUSED_TARGETS, Adapter, TensorKey
from training.layout import Stage
from training.low_rank import LowRankExchange, Spans


@dataclass(frozen=True)
class FusedLayer:
    """Which fused Megatron layer a wrapper stands for: its kind (a key of FUSED_TARGETS) and layer number."""

    kind: str
    layer: int
    stage: Stage

    @property
    def row_parallel(self) -> bool:
        return not self.stage.base.target_shape(FUSED_TARGETS[self.kind][0]).column_parallel

    @property
    def columns(self) -> dict[str, slice]:
        """Where this rank's outputs of each target are."""
        columns, start = {}, 0
        for target in FUSED_TARGETS[self.kind]:
            num_out = self.stage.base.target_shape(target).num_out
            size = num_out if self.row_parallel else num_out // self.stage.tp
            columns[target] = slice(start, start + size)
            start += size
        return columns


@dataclass(frozen=True)
class MatrixB:
    """B [out, r] of one target: views of values and gradient, the columns of y and of A x that it works on."""

    values: Tensor
    gradient: Tensor
    columns: slice
    low_columns: slice


@dataclass(frozen=True)
class FusedPair:
    """One tenant's part in one fused layer: stacked A [R, in] and its gradient (views), and B of each target."""

    values_a: Tensor
    gradient_a: Tensor
    matrices_b: tuple[MatrixB, ...]
    scale: float


def fused_pair(adapter: Adapter, place: FusedLayer) -> FusedPair | None:
    """A tenant's part in a layer; None if its adapter has none."""
    targets = [target for target in place.columns if TensorKey(place.layer, target, "A") in adapter.parameters]
    if not targets:
        return None
    keys = [TensorKey(place.layer, target, "A") for target in targets]
    values_a, gradient_a = (adapter.rows(flat, keys) for flat in (adapter.values.detach(), adapter.gradient))
    if place.row_parallel:  # stored as [in, r]
        values_a, gradient_a = values_a.t(), gradient_a.t()
    matrices_b, rank = [], adapter.config.rank
    for index, target in enumerate(targets):
        key = TensorKey(place.layer, target, "B")
        low_columns = slice(index * rank, (index + 1) * rank)
        matrices_b.append(MatrixB(adapter.parameters[key], adapter.gradients[key], place.columns[target], low_columns))
    return FusedPair(values_a, gradient_a, tuple(matrices_b), adapter.config.scale)


class MultiLoraLinear(nn.Module):
    """Wraps one frozen column- or row-parallel layer. `spans` is set before every forward of its transformer layer."""

    def __init__(
        self, frozen: nn.Module, place: FusedLayer, exchange: LowRankExchange, adapters: dict[str, Adapter]
    ) -> None:
        super().__init__()
        self.frozen = frozen
        self.exchange = exchange
        pairs = {tenant: fused_pair(adapter, place) for tenant, adapter in adapters.items()}
        self.pairs = {tenant: pair for tenant, pair in pairs.items() if pair is not None}
        self.spans: Spans | None = None
        # Makes autograd call the backward pass also where nothing before this layer needs a gradient.
        self.anchor = torch.zeros((), requires_grad=True, device=frozen.weight.device)

    @property
    def weight(self) -> Tensor:
        return self.frozen.weight

    def forward(self, hidden: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
        """hidden_TBD -> (output_TBO, bias). Extra arguments are the frozen layer's own."""
        output, bias = self.frozen(hidden, *args, **kwargs)
        spans = self.spans
        if spans is None:
            raise RuntimeError("MultiLoraLinear was called without spans; chunks travel as LoraChunkParams")
        pairs = {index: self.pairs[tenant] for index, tenant in enumerate(spans.tenants) if tenant in self.pairs}
        if pairs:
            output = _AddLowRank.apply(output, hidden, self.anchor, pairs, spans, self.exchange)
        return output, bias


class _AddLowRank(torch.autograd.Function):
    """Adds s B A x to the frozen layer's output, in place: nobody else has seen that output.

    Backward sums the gradients of A and B into their buffers itself; autograd knows only x and y. The output is not
    marked dirty: where Megatron reduces over one rank it is a view made in a Function, which autograd would refuse.
    """

    @staticmethod
    def forward(ctx, output, hidden, _anchor, pairs, spans, exchange):
        sizes_in, sizes_out = exchange.sizes(spans)
        inputs, outputs = hidden.split(sizes_in, spans.dim), output.split(sizes_out, spans.dim)
        lows = {index: _product(inputs[index], pair.values_a.t()) for index, pair in pairs.items()}
        lows = exchange.forward(lows, spans)
        for index, pair in pairs.items():
            for matrix in pair.matrices_b:
                low = lows[index][..., matrix.low_columns]
                _add_product(outputs[index][..., matrix.columns], low, matrix.values.t(), pair.scale)
        ctx.save_for_backward(hidden, *lows.values())
        ctx.pairs, ctx.spans, ctx.exchange = pairs, spans, exchange
        return output

    @staticmethod
    def backward(ctx, gradient):
        hidden, *saved_lows = ctx.saved_tensors
        pairs, spans, exchange = ctx.pairs, ctx.spans, ctx.exchange
        sizes_in, sizes_out = exchange.sizes(spans)
        gradients = gradient.split(sizes_out, spans.dim)
        low_gradients = {}
        for (index, pair), low in zip(pairs.items(), saved_lows, strict=True):
            parts = []
            for matrix in pair.matrices_b:
                own = gradients[index][..., matrix.columns]
                _accumulate(matrix.gradient, own, low[..., matrix.low_columns], pair.scale)
                parts.append(_product(own, matrix.values))
            low_gradients[index] = torch.cat(parts, -1).mul_(pair.scale)
        low_gradients = exchange.backward(low_gradients, spans)
        inputs = hidden.split(sizes_in, spans.dim)
        for index, pair in pairs.items():
            _accumulate(pair.gradient_a, low_gradients[index], inputs[index], 1.0)
        hidden_gradient = None
        if ctx.needs_input_grad[1]:
            hidden_gradient = torch.zeros_like(hidden)
            parts = hidden_gradient.split(sizes_in, spans.dim)
            for index, pair in pairs.items():
                _add_product(parts[index], low_gradients[index], pair.values_a, 1.0)
        return gradient, hidden_gradient, None, None, None, None


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left_TBa right [a, b] -> [T, B, b]. Two matrices: of strided columns torch.matmul would take row by row."""
    return (left.flatten(0, 1) @ right.to(left.dtype)).view(*left.shape[:2], right.shape[1])


def _add_product(target: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """target_TBO += scale * left_TBr right [r, O], in place. One sequence's tokens (B = 1) need no temporary."""
    if target.shape[1] == 1:
        target.squeeze(1).addmm_(left.flatten(0, 1), right.to(left.dtype), alpha=scale)
    else:
        target.add_(_product(left, right), alpha=scale)


def _accumulate(target: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """target [a, b] += scale * the sum over T and B of left_TBa right_TBb, in place.

    Of 16-bit numbers each product is rounded once and summed in the target's float32.
    """
    left, right = left.flatten(0, 1).t(), right.flatten(0, 1)
    if left.dtype == target.dtype:
        target.addmm_(left, right, alpha=scale)
    else:
        target.add_(left @ right, alpha=scale)
