"""`mlflow.json` in the run folder: the MLflow runs of a run, so that a resumed run continues them. No mlflow here."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self


@dataclass(slots=True)
class TrackedRun:
    """An MLflow run, the last step whose metrics it has, and the last evaluation (by the steps done before it)."""

    run_id: str
    last_step: int = -1
    last_evaluation: int = -1


@dataclass(slots=True)
class TrackedRuns:
    """The parent run and one child run per tenant, as far as they were created."""

    parent: TrackedRun | None = None
    tenants: dict[str, TrackedRun] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Self:
        if not path.exists():
            return cls()
        content = json.loads(path.read_text(encoding="utf-8"))
        parent = TrackedRun(**content["parent"]) if content["parent"] else None
        return cls(parent, {name: TrackedRun(**run) for name, run in content["tenants"].items()})

    def write(self, path: Path) -> None:
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps({"schema_version": 1, **asdict(self)}, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)

    @property
    def run_ids(self) -> list[str]:
        parent = [self.parent.run_id] if self.parent else []
        return parent + [run.run_id for run in self.tenants.values()]
