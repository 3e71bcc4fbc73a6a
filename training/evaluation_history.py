"""What a tenant's evaluations have shown so far, and what follows: its best adapter, and whether it has stopped
improving. Part of the controller's state, so a replay after a crash comes to the same decisions. No torch.

Two marks are kept. The best adapter is that of the lowest loss, however small its lead. An evaluation counts as an
improvement only if its loss is lower by more than `min_delta` than at the last improvement, so that many small steps
in the right direction count once they add up.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class EvaluationHistory:
    """Steps count the tenant's own steps done. A loss is None where it was not finite, or before the first evaluation.

    `num_stale` counts the evaluations since the last improvement, whose loss is `reference_loss`.
    """

    last_step: int = 0
    last_loss: float | None = None
    best_step: int = 0
    best_loss: float | None = None
    reference_loss: float | None = None
    num_stale: int = 0

    def after(self, step: int, loss: float | None, min_delta: float) -> "EvaluationHistory":
        """The history with one more evaluation, after the tenant's `step` steps."""
        seen = replace(self, last_step=step, last_loss=loss)
        if loss is None:
            return replace(seen, num_stale=self.num_stale + 1)
        if self.best_loss is None or loss < self.best_loss:
            seen = replace(seen, best_step=step, best_loss=loss)
        if self.reference_loss is None or loss < self.reference_loss - min_delta:
            return replace(seen, reference_loss=loss, num_stale=0)
        return replace(seen, num_stale=self.num_stale + 1)

    @property
    def is_at_best(self) -> bool:
        """Whether the last evaluation is the best so far."""
        return self.best_loss is not None and self.best_step == self.last_step
