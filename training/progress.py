"""How far a run and each of its tenants are: the controller's state, kept in every checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from planning.strategies import Phase


class TenantStatus(StrEnum):
    """`finished`: all steps done. `quarantined`: its updates stayed non-finite. `cancelled`: taken out by request."""

    RUNNING = "running"
    FINISHED = "finished"
    QUARANTINED = "quarantined"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TenantProgress:
    """One tenant: `num_done` of its `num_steps` steps. `num_updates` counts optimiser updates, skipped ones not."""

    num_steps: int
    num_done: int = 0
    status: TenantStatus = TenantStatus.RUNNING
    num_updates: int = 0
    nonfinite_streak: int = 0
    reason: str = ""

    def is_active(self, step: int) -> bool:
        """Whether the tenant takes part in its own step number `step`."""
        return self.status in (TenantStatus.RUNNING, TenantStatus.FINISHED) and step < self.num_steps

    def after_step(self, skipped: bool, max_nonfinite_steps: int) -> "TenantProgress":
        """Progress after the tenant took part in a step."""
        done = replace(
            self,
            num_done=self.num_done + 1,
            num_updates=self.num_updates + (not skipped),
            nonfinite_streak=self.nonfinite_streak + 1 if skipped else 0,
        )
        if done.nonfinite_streak >= max_nonfinite_steps:
            reason = f"{done.nonfinite_streak} non-finite updates in a row"
            return replace(done, status=TenantStatus.QUARANTINED, reason=reason)
        if done.num_done >= self.num_steps:
            return replace(done, status=TenantStatus.FINISHED)
        return done

    def cancelled(self, reason: str) -> "TenantProgress":
        return replace(self, status=TenantStatus.CANCELLED, reason=reason)


@dataclass(frozen=True, slots=True)
class RunProgress:
    """`step` steps are done in all; `phase` is under way since step `phase_start`."""

    tenants: dict[str, TenantProgress]
    step: int = 0
    phase: int = 0
    phase_start: int = 0

    @property
    def phase_step(self) -> int:
        """Steps done in the current phase: the step number of its tenants' samplers."""
        return self.step - self.phase_start

    def active(self, phases: Sequence[Phase], step: int) -> tuple[str, ...]:
        """Tenants of the current phase that take part in global step `step`, in the phase's order."""
        names = phases[self.phase].tenants
        return tuple(name for name in names if self.tenants[name].is_active(step - self.phase_start))

    def total_steps(self, phases: Sequence[Phase]) -> int:
        """Global steps of the whole run, as far as is known now."""
        later = (max(self.tenants[name].num_steps for name in phase.tenants) for phase in phases[self.phase :])
        return self.phase_start + sum(later)

    def after_step(self, skipped: Mapping[str, bool], max_nonfinite_steps: int) -> "RunProgress":
        """Progress after one more step, in which the tenants of `skipped` took part."""
        done = {name: self.tenants[name].after_step(skip, max_nonfinite_steps) for name, skip in skipped.items()}
        return replace(self, step=self.step + 1, tenants={**self.tenants, **done})

    def without_tenant(self, name: str, reason: str) -> "RunProgress":
        """Progress after a tenant was taken out; one that has ended already stays as it ended."""
        tenant = self.tenants[name]
        if tenant.status is not TenantStatus.RUNNING:
            return self
        return replace(self, tenants={**self.tenants, name: tenant.cancelled(reason)})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "RunProgress":
        tenants = {
            name: TenantProgress(**{**tenant, "status": TenantStatus(tenant["status"])})
            for name, tenant in content["tenants"].items()
        }
        return cls(tenants, content["step"], content["phase"], content["phase_start"])
