"""plans.jsonl: every step as it was dispatched. After a crash steps are replayed from it, not planned anew."""

from collections.abc import Collection
from pathlib import Path

from training.journal import Journal, read_journal
from training.step_planner import PlannedStep


class DispatchJournal:
    """Use its `journal` as a context manager."""

    def __init__(self, path: Path) -> None:
        self._records = {record["step"]: record for record in read_journal(path)}
        self.journal = Journal(path)

    def replayed(self, step: int, tenants: Collection[str]) -> PlannedStep | None:
        """The step as it was dispatched before; None if it was not, or with other tenants."""
        if step in self._records:
            planned = PlannedStep.from_record(self._records[step])
            if planned.tenants == set(tenants):
                return planned
        return None

    def append(self, planned: PlannedStep) -> None:
        """Note what is about to be trained, unless it stands there already."""
        step, record = planned.plan.step, planned.to_record()
        if step not in self._records or self._records[step]["plan"] != record["plan"]:
            self.journal.append(record)
            self._records[step] = record
