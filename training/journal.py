"""Append-only JSON lines: `steps.jsonl` (what happened) and `plans.jsonl` (what was dispatched).

A line is written whole and flushed; a process killed while writing leaves a torn last line, which readers pass over
and the next writer cuts off. After a resume a step may stand twice: the last record of a step counts, earlier ones
were redone and are overhead.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType


class Journal:
    """One open journal. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: dict) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Put everything written so far on disk."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.sync()
        self._file.close()


def read_journal(path: Path) -> list[dict]:
    """All whole records; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]  # what follows the last newline is torn or empty


def effective_steps(records: Iterable[dict]) -> list[dict]:
    """The step records that count, in step order: of each step the last one."""
    last = {record["step"]: record for record in records if record["event"] == "step"}
    return [last[step] for step in sorted(last)]


def effective_evaluations(records: Iterable[dict]) -> list[dict]:
    """The evaluation records that count, in the order of the steps that they follow: of each step the last one."""
    last = {record["step"]: record for record in records if record["event"] == "evaluation"}
    return [last[step] for step in sorted(last)]


def overhead_gpu_seconds(records: Iterable[dict]) -> float:
    """GPU seconds of launches, checkpoints, stops and steps that were redone."""
    records = list(records)
    counted = {id(record) for record in effective_steps(records)}
    redone = sum(record["gpu_seconds"] for record in records if record["event"] == "step" and id(record) not in counted)
    return redone + sum(record.get("overhead_gpu_seconds", 0.0) for record in records)


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
