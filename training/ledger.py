"""Where every GPU second of a training goes, and the journal that says so.

One clock is charged at every boundary, so nothing is counted twice or missed: GPU seconds of a step are reserved GPUs x
wall seconds since the charge before; launches, checkpoint stalls, restarts and stops are overhead.
"""

import time
from collections.abc import Callable
from pathlib import Path

from training.journal import Journal, effective_steps, overhead_gpu_seconds, read_journal

Observer = Callable[[dict], None]


class Ledger:
    """Writes steps.jsonl; `observe` sees every record as it is written. Use its `journal` as a context manager."""

    def __init__(self, path: Path, num_gpus: int, observe: Observer) -> None:
        before = read_journal(path)
        self.spent_gpu_seconds = sum(step["gpu_seconds"] for step in effective_steps(before))
        self.spent_gpu_seconds += overhead_gpu_seconds(before)
        self.journal = Journal(path)
        self._num_gpus = num_gpus
        self._observe = observe
        self._charged = time.perf_counter()

    def charge(self) -> float:
        """GPU seconds since the last charge."""
        now = time.perf_counter()
        seconds, self._charged = now - self._charged, now
        return seconds * self._num_gpus

    def overhead(self, event: str, step: int, **details: object) -> None:
        """Record an event, and charge the time since the last charge to overhead."""
        self.record({"event": event, "step": step, **details, "overhead_gpu_seconds": self.charge()})

    def record(self, record: dict) -> None:
        record = {"schema_version": 1, "time": time.time(), **record}
        self.spent_gpu_seconds += record.get("gpu_seconds", 0.0) + record.get("overhead_gpu_seconds", 0.0)
        self.journal.append(record)
        self._observe(record)

    def damaged_checkpoint(self, folder: Path, reason: str) -> None:
        """Record a checkpoint that is passed over."""
        self.record({"event": "damaged_checkpoint", "folder": folder.name, "reason": reason})
