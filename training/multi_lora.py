"""Several tenants' adapters in one forward pass: a wrapper around a frozen Megatron linear layer.

    y = W x + s_t B_t A_t x     for the tokens of tenant t, t = 1..N in one micro-batch

Tokens of one tenant lie next to each other, so the input is split into one span per tenant (`torch.split`: its backward
is one concatenation; slices would cost O(N) full-size additions, and a dense mask would let one tenant's NaN reach the
others as 0 * NaN). A Megatron layer fuses q, k, v (or gate, up); the fused A stacks their rows and the fused B is block
diagonal with rows in Megatron's order, so that a tenant costs two matrix products per fused layer.

What tensor-parallel ranks exchange, with and without sequence parallelism, is in `low_rank`. Not here: dropout.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.adapters import Adapter
from training.layout import Stage
from training.low_rank import LowRankExchange, Spans

FUSED_TARGETS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


ROW_PARALLEL = ("linear_proj", "linear_fc2")


@dataclass(frozen=True)
class FusedLayer:
    """Which fused Megatron layer a wrapper stands for: its kind (a key of FUSED_TARGETS) and layer number."""

    kind: str
    layer: int
    stage: Stage

    @property
    def targets(self) -> tuple[str, ...]:
        return FUSED_TARGETS[self.kind]

    @property
    def row_parallel(self) -> bool:
        return self.kind in ROW_PARALLEL


class MultiLoraLinear(nn.Module):
    """Wraps one frozen column- or row-parallel layer. `spans` is set before every forward of its transformer layer."""

    def __init__(
        self, frozen: nn.Module, place: FusedLayer, exchange: LowRankExchange, adapters: dict[str, Adapter]
    ) -> None:
        super().__init__()
        self.frozen = frozen
        self.place = place
        self.exchange = exchange
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
        pairs = {index: self._fused_pair(tenant) for index, tenant in enumerate(spans.tenants)}
        fused = {index: pair for index, pair in pairs.items() if pair is not None}
        if not fused:
            return output, bias
        sizes_in, sizes_out = self.exchange.sizes(spans)
        parts = hidden.split(sizes_in, spans.dim)
        lows = {index: F.linear(parts[index], pair[0].to(hidden.dtype)) for index, pair in fused.items()}
        lows = self.exchange(lows, spans)
        updates = []
        for index, size in enumerate(sizes_out):
            if index in fused:
                updates.append(F.linear(lows[index], fused[index][1].to(hidden.dtype)))
            else:
                shape = [size if dim == spans.dim else n for dim, n in enumerate(output.shape)]
                updates.append(output.new_zeros(shape))
        return output + torch.cat(updates, spans.dim), bias

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
        place, base, tp = self.place, self.place.stage.base, self.place.stage.tp
        if len(place.targets) == 1:
            return matrices_b[place.targets[0]]
        num_groups = base.num_kv_heads // tp if place.kind == "linear_qkv" else 1
        total_rank = sum(matrix.shape[1] for matrix in matrices_b.values())
        blocks, column = [], 0
        for target in place.targets:
            rows = base.target_shape(target).num_out // tp // num_groups
            matrix = matrices_b.get(target)
            if matrix is None:
                blocks.append(next(iter(matrices_b.values())).new_zeros(num_groups, rows, total_rank))
                continue
            rank = matrix.shape[1]
            blocks.append(F.pad(matrix.view(num_groups, rows, rank), (column, total_rank - column - rank)))
            column += rank
        return torch.cat(blocks, 1).flatten(0, 1)
