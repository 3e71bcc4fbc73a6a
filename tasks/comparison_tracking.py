"""A comparison in MLflow: a parent run `kind=comparison`, above the joint runs of its variants.

As with every run, MLflow's absence costs a warning, not the comparison.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.mlflow_store import STORE_ERRORS, MlflowStore, RunSpec
from tasks.run_folder import read_json, write_json
from tasks.tracking_config import TrackingConfig
from tasks.tracking_metrics import Point

logger = logging.getLogger(__name__)


class ComparisonTracker:
    """The MLflow run of one comparison, continued when the comparison is."""

    def __init__(self, config: TrackingConfig, folder: Path) -> None:
        self._config = config
        self._path = folder / "mlflow.json"
        self._store = MlflowStore(config)
        self.run_id: str | None = read_json(self._path)["run_id"] if self._path.exists() else None

    def open(self, spec: RunSpec) -> None:
        """Create the run, or continue it if MLflow still has it."""

        def create() -> None:
            known = self._store.params_of_runs([self.run_id] if self.run_id else [])
            if self.run_id not in known:
                self.run_id = self._store.create_run(spec)
                write_json(self._path, {"schema_version": 1, "run_id": self.run_id})
            assert self.run_id is not None
            self._store.continue_run(self.run_id, spec, known.get(self.run_id, frozenset()))

        self._attempt(create)

    def close(self, comparison: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Numbers of every variant as `<number>/<variant>`, and the files; the run is finished."""
        if self.run_id is None:
            return
        run_id = self.run_id

        def write() -> None:
            self._store.log_points(run_id, [Point(0, time.time(), comparison_metrics(comparison))])
            for path in files:
                self._store.log_file(run_id, path, "comparison")
            self._store.end_run(run_id, "FINISHED")

        self._attempt(write)

    def fail(self, status: str) -> None:
        """`status` is FAILED or KILLED."""
        run_id = self.run_id
        if run_id is not None:
            self._attempt(lambda: self._store.end_run(run_id, status))

    def _attempt(self, send: Callable[[], None]) -> None:
        if not self._config.enabled:
            return
        try:
            send()
        except STORE_ERRORS as error:
            logger.warning("The comparison goes on without MLflow at %s: %s", self._config.mlflow_uri, error)


def comparison_metrics(comparison: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of the table; reductions that have no baseline are left out."""
    numbers = (
        "simulated_gpu_seconds",
        "measured_gpu_seconds",
        "simulated_reduction",
        "measured_reduction",
        "padding_ratio",
        "imbalance",
        "step_seconds",
    )
    metrics = {
        f"{number}/{row['variant']}": row[number]
        for row in comparison["variants"]
        for number in numbers
        if row[number] is not None
    }
    return metrics | {"adapters_within_tolerance": float(comparison["adapters_within_tolerance"])}
