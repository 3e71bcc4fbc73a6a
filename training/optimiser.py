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
    """AdamW over one adapter's local tensors. Moments have the shape of their parameter."""

    def __init__(self, adapter: Adapter, config: OptimiserConfig) -> None:
        self.adapter = adapter
        self.config = config
        self.adamw = torch.optim.AdamW(
            list(adapter.parameters.values()),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            foreach=True,
        )

    def moments(self, key: TensorKey) -> dict[str, torch.Tensor]:
        """First and second moment of one tensor; zeros before the first update."""
        parameter = self.adapter.parameters[key]
        state = self.adamw.state.get(parameter, {})
        return {name: state[name] if name in state else torch.zeros_like(parameter) for name in MOMENTS}

    def restore(self, key: TensorKey, moments: dict[str, torch.Tensor], num_updates: int) -> None:
        """Continue from saved moments after `num_updates` updates."""
        parameter = self.adapter.parameters[key]
        state = {name: moments[name].to(parameter.device) for name in MOMENTS}
        self.adamw.state[parameter] = {"step": torch.tensor(float(num_updates)), **state}

    def update(self, grad_norm: float, learning_rate: float) -> None:
        self.adamw.param_groups[0]["lr"] = learning_rate
        limit = self.config.max_grad_norm
        if limit is not None and grad_norm > limit:
            gradients = [parameter.grad for parameter in self.adapter.parameters.values()]
            torch._foreach_mul_(gradients, limit / (grad_norm + 1e-6))
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
        square_sum = torch.zeros((), dtype=torch.float64, device=self.stage.device)
        num_nonfinite = torch.zeros((), dtype=torch.float64, device=self.stage.device)
        for key, parameter in adapter.parameters.items():
            gradient = parameter.grad
            num_nonfinite += (~torch.isfinite(gradient)).sum()
            is_split = adapter.place(key).is_split
            if self.stage.position.replica.index == 0 and (is_split or self.stage.tp_rank == 0):
                square_sum += gradient.double().square().sum()
        return torch.stack([square_sum.nan_to_num(0.0, 0.0, 0.0), num_nonfinite])
