"""One AdamW per tenant, stepped only in steps that the tenant takes part in.

Every rank decides alike, from one small all-reduce in float64: the squared gradient norm, which only replica 0
contributes (a norm computed per replica would differ in its last bits), and a count of non-finite values, from all
ranks. A tenant with a non-finite gradient is skipped: neither its adapter nor its moments move, and nobody else's do
anything else than without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from training.adapters import Adapter, TensorKey
from training.config import OptimiserConfig
from training.layout import Stage

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One tenant's update in one step: its gradient norm before clipping, its rate, and whether it was skipped."""

    grad_norm: float
    learning_rate: float
    skipped: bool


class TenantOptimiser:
    """AdamW over one adapter's local tensors, all in one flat parameter."""

    def __init__(self, adapter: Adapter, config: OptimiserConfig) -> None:
        self.adapter = adapter
        self.config = config
        self.adamw = torch.optim.AdamW(
            [adapter.values],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            foreach=True,
        )

    def moments(self) -> dict[str, dict[TensorKey, torch.Tensor]]:
        """First and second moment of every tensor, in its shape; zeros before the first update."""
        state = self.adamw.state.get(self.adapter.values) or dict.fromkeys(
            MOMENTS, torch.zeros_like(self.adapter.values)
        )
        return {name: self.adapter.views(state[name]) for name in MOMENTS}

    def restore(self, moments: Mapping[str, Mapping[TensorKey, torch.Tensor]], num_updates: int) -> None:
        """Continue from saved moments (local tensors) after `num_updates` updates."""
        state = {name: self.adapter.flattened(moments[name]) for name in MOMENTS}
        self.adamw.state[self.adapter.values] = {"step": torch.tensor(float(num_updates)), **state}

    def update(self, grad_norm: float, learning_rate: float) -> None:
        self.adamw.param_groups[0]["lr"] = learning_rate
        limit = self.config.max_grad_norm
        if limit is not None and grad_norm > limit:
            self.adapter.gradient.mul_(limit / (grad_norm + 1e-6))
        self.adamw.step()


class JointOptimiser:
    """All tenants' optimisers of one rank. `control_group` is the whole world over gloo."""

    def __init__(self, optimisers: dict[str, TenantOptimiser], stage: Stage, control_group: dist.ProcessGroup) -> None:
        self.optimisers = optimisers
        self.stage = stage
        self.control_group = control_group

    @torch.no_grad()
    def step(self, learning_rates: Mapping[str, float]) -> dict[str, UpdateReport]:
        """Update the tenants of `learning_rates` (the same on every rank) and drop all gradients.

        Collective over the world, in the order of the tenants' names.
        """
        tenants = sorted(learning_rates)
        own = [self._statistics(self.optimisers[tenant].adapter) for tenant in tenants]
        statistics = torch.stack(own).cpu()  # the only wait for the GPU
        dist.all_reduce(statistics, group=self.control_group)
        reports = {}
        for tenant, (square_sum, num_nonfinite) in zip(tenants, statistics.tolist(), strict=True):
            report = UpdateReport(square_sum**0.5, learning_rates[tenant], skipped=num_nonfinite > 0)
            if not report.skipped:
                self.optimisers[tenant].update(report.grad_norm, report.learning_rate)
            self.optimisers[tenant].adapter.clear_gradients()
            reports[tenant] = report
        return reports

    def _statistics(self, adapter: Adapter) -> torch.Tensor:
        """[sum of squares that this rank contributes, non-finite values], float64."""
        num_nonfinite = (~torch.isfinite(adapter.gradient)).sum().double()
        counted = adapter.gradient if self.stage.tp_rank == 0 else adapter.gradient[adapter.num_replicated :]
        if self.stage.position.replica.index != 0:
            return torch.stack([torch.zeros_like(num_nonfinite), num_nonfinite])
        square_sum = torch.linalg.vector_norm(counted, dtype=torch.float64).square()
        return torch.stack([square_sum.nan_to_num(0.0, 0.0, 0.0), num_nonfinite])
