"""How far each tenant is."""

from dataclasses import asdict, dataclass, replace
from enum import StrEnum


class TenantStatus(StrEnum):
    """`finished`: all steps done. `quarantined`: taken out because its updates stayed non-finite."""

    RUNNING = "running"
    FINISHED = "finished"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class TenantProgress:
    """One tenant's state, kept in every checkpoint. `num_updates` counts optimiser updates, skipped ones not."""

    num_steps: int
    status: TenantStatus = TenantStatus.RUNNING
    num_updates: int = 0
    nonfinite_streak: int = 0
    reason: str = ""

    def is_active(self, step: int) -> bool:
        return self.status is not TenantStatus.QUARANTINED and step < self.num_steps

    def after_step(self, num_done: int, skipped: bool, max_nonfinite_steps: int) -> "TenantProgress":
        """Progress after the tenant took part in a step; `num_done` steps are done now."""
        streak = self.nonfinite_streak + 1 if skipped else 0
        progress = replace(self, num_updates=self.num_updates + (not skipped), nonfinite_streak=streak)
        if streak >= max_nonfinite_steps:
            reason = f"{streak} non-finite updates in a row"
            return replace(progress, status=TenantStatus.QUARANTINED, reason=reason)
        if num_done >= self.num_steps:
            return replace(progress, status=TenantStatus.FINISHED)
        return progress

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict) -> "TenantProgress":
        return cls(**{**content, "status": TenantStatus(content["status"])})
