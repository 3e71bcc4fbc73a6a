"""How far a run and each of its tenants are: the controller's state, kept in every checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from planning.strategies import Phase
from training.config import EvaluationConfig, Publish, TenantConfig
from training.evaluation_history import EvaluationHistory


class TenantStatus(StrEnum):
    """`finished`: all steps done. `stopped_early`: its evaluation loss stopped improving. Both are successes.

    `quarantined`: its updates stayed non-finite. `cancelled`: taken out by request.
    """

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED_EARLY = "stopped_early"
    QUARANTINED = "quarantined"
    CANCELLED = "cancelled"

    @property
    def is_success(self) -> bool:
        """Trained to its end: the tenant's adapter is to be published."""
        return self in (TenantStatus.FINISHED, TenantStatus.STOPPED_EARLY)


@dataclass(frozen=True, slots=True)
class TenantProgress:
    """One tenant: `num_done` of its `num_steps` steps. `num_updates` counts optimiser updates, skipped ones not."""

    num_steps: int
    num_done: int = 0
    status: TenantStatus = TenantStatus.RUNNING
    num_updates: int = 0
    nonfinite_streak: int = 0
    reason: str = ""
    evaluations: EvaluationHistory = field(default_factory=EvaluationHistory)

    def is_active(self, step: int) -> bool:
        """Whether the tenant takes part in its own step number `step`."""
        return self.status in (TenantStatus.RUNNING, TenantStatus.FINISHED) and step < self.num_steps

    @property
    def num_steps_in_all(self) -> int:
        """Steps that the tenant will have done at its end, as far as is known now."""
        return self.num_steps if self.is_active(self.num_done) else self.num_done

    def is_due(self, evaluation: EvaluationConfig | None) -> bool:
        """Whether the tenant is to be evaluated before anything else happens to it."""
        may_be = self.status in (TenantStatus.RUNNING, TenantStatus.FINISHED)
        if evaluation is None or not may_be or self.evaluations.last_step == self.num_done:
            return False
        return self.status is TenantStatus.FINISHED or self.num_done % evaluation.every == 0

    def is_publishable(self, evaluation: EvaluationConfig | None) -> bool:
        """Whether the tenant's adapter is as it will be published."""
        return self.status.is_success and not self.is_due(evaluation)

    def published_step(self, evaluation: EvaluationConfig | None) -> int:
        """The step of the tenant whose adapter is published at its end."""
        takes_best = evaluation is not None and evaluation.publish is Publish.BEST
        return self.evaluations.best_step if takes_best and self.evaluations.best_step else self.num_done

    def keeps_last(self, evaluation: EvaluationConfig | None) -> bool:
        """Whether the adapter just evaluated is the best so far and may be published as such."""
        return evaluation is not None and evaluation.publish is Publish.BEST and self.evaluations.is_at_best

    def after_evaluation(self, loss: float | None, evaluation: EvaluationConfig) -> "TenantProgress":
        """Progress after an evaluation, which may end the tenant."""
        history = self.evaluations.after(self.num_done, loss, evaluation.min_delta)
        done = replace(self, evaluations=history)
        has_patience = evaluation.patience is None or history.num_stale < evaluation.patience
        if has_patience or self.status is not TenantStatus.RUNNING:
            return done
        best = "none was finite"
        if history.best_loss is not None:
            best = f"the best was {history.best_loss:.4g} after step {history.best_step}"
        reason = f"evaluation loss did not improve in {history.num_stale} evaluations; {best}"
        return replace(done, status=TenantStatus.STOPPED_EARLY, reason=reason)

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
        later = (max(self.tenants[name].num_steps_in_all for name in phase.tenants) for phase in phases[self.phase :])
        return self.phase_start + sum(later)

    def after_step(self, skipped: Mapping[str, bool], max_nonfinite_steps: int) -> "RunProgress":
        """Progress after one more step, in which the tenants of `skipped` took part."""
        done = {name: self.tenants[name].after_step(skip, max_nonfinite_steps) for name, skip in skipped.items()}
        return replace(self, step=self.step + 1, tenants={**self.tenants, **done})

    def due(self, phases: Sequence[Phase], tenants: Mapping[str, TenantConfig]) -> tuple[str, ...]:
        """Tenants of the current phase that are to be evaluated before the next step, in the phase's order."""
        names = phases[self.phase].tenants
        return tuple(name for name in names if self.tenants[name].is_due(tenants[name].evaluation))

    def after_evaluation(
        self, losses: Mapping[str, float | None], tenants: Mapping[str, TenantConfig]
    ) -> "RunProgress":
        """Progress after the tenants of `losses` were evaluated."""
        evaluated = {}
        for name, loss in losses.items():
            evaluation = tenants[name].evaluation
            assert evaluation is not None, f"tenant {name!r} is evaluated without being asked for"
            evaluated[name] = self.tenants[name].after_evaluation(loss, evaluation)
        return replace(self, tenants={**self.tenants, **evaluated})

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
            name: TenantProgress(
                **{
                    **tenant,
                    "status": TenantStatus(tenant["status"]),
                    "evaluations": EvaluationHistory(**tenant.get("evaluations", {})),
                }
            )
            for name, tenant in content["tenants"].items()
        }
        return cls(tenants, content["step"], content["phase"], content["phase_start"])
