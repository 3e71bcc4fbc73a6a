"""Tracking of a run in MLflow: a parent run for the joint training and a nested child run for each tenant.

Training never waits long for tracking and never dies of it. `_Attempts.succeeds` is the one place where MLflow's
failures end: one warning, then a pause. What could not be written is written later, by this process or by the next one
that opens the same run folder: steps are read again from steps.jsonl, everything else waits in memory. `mlflow.json`
says which runs are continued and from which step on, so no point is written twice (but for a batch whose answer was
lost on the way). Only numbers, names and the files passed in reach MLflow, never rows of a data set.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import polars as pl

from tasks.mlflow_store import MAX_METRICS_PER_BATCH, STORE_ERRORS, MlflowStore, RunSpec, VersionSpec
from tasks.registry import TRAINED_AT, model_name
from tasks.summary import is_success
from tasks.tracked_runs import TrackedRun, TrackedRuns
from tasks.tracking_config import TrackingConfig
from tasks.tracking_metrics import (
    Point,
    joint_evaluation_point,
    joint_point,
    merged,
    metric_part,
    point_batches,
    summary_metrics,
    tenant_evaluation_point,
    tenant_point,
)
from training.journal import effective_evaluations, effective_steps, read_journal

logger = logging.getLogger(__name__)

FLUSH_STEPS = 10
FLUSH_SECONDS = 2.0
RETRY_SECONDS = 30.0
MAX_WAIT_SHARE = 0.05  # of training's time, spent waiting for MLflow


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What a run is in MLflow: `params` go to the parent, `tenant_params` to the tenant's child, `tags` to all."""

    run_name: str
    run_dir: Path
    config_hash: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    tenants: tuple[str, ...]
    tenant_params: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


class Tracker:
    """Tracks one run, as a context manager: its runs end FINISHED, FAILED after an error, KILLED after an interrupt."""

    def __init__(self, config: TrackingConfig, identity: RunIdentity) -> None:
        self._config = config
        self._identity = identity
        self._store = MlflowStore(config)
        self._attempts = _Attempts(config.mlflow_uri)
        self._runs_path = identity.run_dir / "mlflow.json"
        self._runs = TrackedRuns.read(self._runs_path)
        self._is_open = False
        self._is_behind = True  # steps.jsonl may have steps that neither MLflow nor `_records` has
        self._records: dict[int, dict[str, Any]] = {}
        self._evaluations: dict[int, dict[str, Any]] = {}
        self._waiting: list[Callable[[], None]] = []
        self._bad_tenants: set[str] = set()
        self._sent_at = time.monotonic()

    def __enter__(self) -> Self:
        self._send()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        status = "FINISHED" if error is None else "FAILED" if isinstance(error, Exception) else "KILLED"
        self._waiting.append(partial(self._end_runs, status))
        self._send()
        if self._is_behind and self._config.enabled:
            logger.warning("MLflow lacks a part of run %s; later: lobra track RUN.yaml", self._identity.run_dir)

    @property
    def is_behind(self) -> bool:
        """MLflow lacks something, or was not asked since."""
        return self._is_behind

    @property
    def parent_run_id(self) -> str | None:
        """The MLflow run of the joint training; None if tracking is off or MLflow was never reached."""
        return self._runs.parent.run_id if self._runs.parent else None

    @property
    def parent_url(self) -> str | None:
        """The joint run's page on a tracking server; None without a server."""
        if not self._is_open or not self._config.mlflow_uri.startswith("http"):
            return None
        server = self._config.mlflow_uri.rstrip("/")
        return f"{server}/#/experiments/{self._store.experiment_id}/runs/{self.parent_run_id}"

    def log_step(self, record: dict[str, Any]) -> None:
        """Take a record that steps.jsonl has already; events other than `step` and `evaluation` are passed over."""
        if record["event"] not in ("step", "evaluation"):
            return
        if self._is_behind:
            self._records.clear()
            self._evaluations.clear()
        (self._records if record["event"] == "step" else self._evaluations)[record["step"]] = record
        is_due = len(self._records) >= FLUSH_STEPS or time.monotonic() - self._sent_at >= FLUSH_SECONDS
        if (is_due or self._is_behind) and self._attempts.may_interrupt_training:
            self._send()

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """The numbers of summary.json as `summary/...`; a tenant that was not trained to its end will end as FAILED."""
        self._bad_tenants = {name for name, totals in summary["tenants"].items() if not is_success(totals["status"])}
        self._send_item(partial(self._write_summary, summary))

    def log_histogram(self, histogram: pl.DataFrame) -> None:
        """Each tenant's lengths (`tenant, length, count`) as the data set of its child run."""
        self._send_item(partial(self._write_histogram, histogram))

    def log_artifact_dir(self, tenant: str | None, folder: Path, artifact_path: str) -> None:
        """The files of a folder, to the tenant's run, or to the parent if `tenant` is None."""
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder} to log")
        self._send_item(lambda: self._store.log_folder(self._run(tenant).run_id, folder, artifact_path))

    def log_file(self, path: Path, artifact_path: str) -> None:
        """A file, to a folder of the parent's artifacts ("" is their root)."""
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path} to log")
        self._send_item(lambda: self._store.log_file(self._run(None).run_id, path, artifact_path))

    def register_adapter(self, tenant: str, artifact_path: str, tags: Mapping[str, str]) -> None:
        """Make the files logged at `artifact_path` of a tenant's run the newest version of its registered model."""
        if self._config.register_adapters:
            self._send_item(partial(self._register, tenant, artifact_path, tags))

    def _run(self, tenant: str | None) -> TrackedRun:
        run = self._runs.parent if tenant is None else self._runs.tenants[tenant]
        assert run is not None
        return run

    def _send_item(self, item: Callable[[], None]) -> None:
        self._waiting.append(item)
        if not self._attempts.is_paused:
            self._send()

    def _send(self) -> None:
        if self._config.enabled:
            self._is_behind = not self._attempts.succeeds(self._write_everything)
            self._sent_at = time.monotonic()

    def _write_everything(self) -> None:
        if not self._is_open:
            self._open_runs()
        self._write_steps()
        while self._waiting:
            self._waiting[0]()
            self._waiting.pop(0)

    def _open_runs(self) -> None:
        """Continue the runs of mlflow.json that MLflow still has, create the others."""
        self._store.end_stale_runs()
        params_of_runs = self._store.params_of_runs(self._runs.run_ids)
        identity = self._identity
        tags = {**identity.tags, "lobra.config_hash": identity.config_hash}

        def opened(run: TrackedRun | None, spec: RunSpec) -> TrackedRun:
            if run is None or run.run_id not in params_of_runs:
                return TrackedRun(self._store.create_run(spec))
            return run

        spec = RunSpec(identity.run_name, identity.params, tags | {"kind": "joint"}, self._config.parent_run_id)
        parent = self._runs.parent = opened(self._runs.parent, spec)
        specs = {parent.run_id: spec}
        self._runs.write(self._runs_path)
        for tenant in identity.tenants:
            own_tags = tags | {"kind": "tenant", "tenant": tenant}
            spec = RunSpec(tenant, identity.tenant_params.get(tenant, {}), own_tags, parent.run_id)
            run = self._runs.tenants[tenant] = opened(self._runs.tenants.get(tenant), spec)
            specs[run.run_id] = spec
            self._runs.write(self._runs_path)
        for run_id, spec in specs.items():
            self._store.continue_run(run_id, spec, params_of_runs.get(run_id, frozenset()))
        self._is_open = True

    def _write_steps(self) -> None:
        on_disk = read_journal(self._identity.run_dir / "steps.jsonl") if self._is_behind else []
        steps = merged(effective_steps(on_disk), self._records)
        evaluations = merged(effective_evaluations(on_disk), self._evaluations)
        self._write_points(self._run(None), map(joint_point, steps), map(joint_evaluation_point, evaluations))
        for tenant, run in self._runs.tenants.items():
            own = (tenant_point(record, tenant) for record in steps if tenant in record["tenants"])
            held_out = (tenant_evaluation_point(each, tenant) for each in evaluations if tenant in each["tenants"])
            self._write_points(run, own, held_out)
        self._records.clear()
        self._evaluations.clear()

    def _write_points(self, run: TrackedRun, steps: Iterable[Point], evaluations: Iterable[Point]) -> None:
        """What MLflow lacks of both."""
        for batch in point_batches([p for p in steps if p.step > run.last_step], MAX_METRICS_PER_BATCH):
            self._store.log_points(run.run_id, batch)
            run.last_step = batch[-1].step
            self._runs.write(self._runs_path)
        for batch in point_batches([p for p in evaluations if p.step > run.last_evaluation], MAX_METRICS_PER_BATCH):
            self._store.log_points(run.run_id, batch)
            run.last_evaluation = batch[-1].step
            self._runs.write(self._runs_path)

    def _write_summary(self, summary: Mapping[str, Any]) -> None:
        now, last_step = time.time(), max(self._run(None).last_step, 0)
        self._store.log_points(self._run(None).run_id, [Point(last_step, now, summary_metrics(summary))])
        for tenant, run in self._runs.tenants.items():
            totals = summary["tenants"][tenant]
            self._store.log_points(run.run_id, [Point(last_step, now, summary_metrics(totals))])
            self._store.set_tag(run.run_id, "status", totals["status"])

    def _write_histogram(self, histogram: pl.DataFrame) -> None:
        for tenant, run in self._runs.tenants.items():
            lengths = histogram.filter(pl.col("tenant") == tenant).select("length", "count")
            if lengths.is_empty():  # its data could not be prepared
                continue
            self._store.log_lengths(run.run_id, f"lengths of {metric_part(tenant)}", lengths)

    def _register(self, tenant: str, artifact_path: str, tags: Mapping[str, str]) -> None:
        own_tags = {**tags, "joint_run_id": self._run(None).run_id}
        name = model_name(self._config.experiment, tenant)
        alias = self._config.registry_alias
        spec = VersionSpec(name, self._run(tenant).run_id, artifact_path, own_tags, TRAINED_AT, alias)
        version = self._store.register(spec)
        logger.info("Adapter of tenant %s is version %s of %s", tenant, version, name)

    def _end_runs(self, status: str) -> None:
        for tenant, run in self._runs.tenants.items():
            is_bad = status == "FINISHED" and tenant in self._bad_tenants
            self._store.end_run(run.run_id, "FAILED" if is_bad else status)
        self._store.end_run(self._run(None).run_id, status)


def sweep_stale_runs(config: TrackingConfig) -> int:
    """End the runs that dead processes of this host left RUNNING; returns how many. A Tracker does so when it opens."""
    num_ended = 0

    def sweep() -> None:
        nonlocal num_ended
        num_ended = MlflowStore(config).end_stale_runs()

    if config.enabled:
        _Attempts(config.mlflow_uri).succeeds(sweep)
    return num_ended


class _Attempts:
    """Ends MLflow's failures, and says when the next attempt is due."""

    def __init__(self, mlflow_uri: str) -> None:
        self._mlflow_uri = mlflow_uri
        self._is_down = False
        self._retry_at = 0.0
        self._next_interruption_at = 0.0

    @property
    def is_paused(self) -> bool:
        return time.monotonic() < self._retry_at

    @property
    def may_interrupt_training(self) -> bool:
        """Not in a pause, and not so soon that a slow MLflow takes more than its share of training's time."""
        return not self.is_paused and time.monotonic() >= self._next_interruption_at

    def succeeds(self, send: Callable[[], None]) -> bool:
        """Call `send`; False if MLflow failed."""
        started = time.monotonic()
        try:
            send()
        except STORE_ERRORS as error:
            if not self._is_down:
                logger.warning("Tracking pauses, training goes on. MLflow at %s: %s", self._mlflow_uri, error)
            self._is_down = True
            self._retry_at = time.monotonic() + RETRY_SECONDS
        else:
            if self._is_down:
                logger.info("Tracking goes on: MLflow at %s answers again", self._mlflow_uri)
            self._is_down = False
        ended = time.monotonic()
        self._next_interruption_at = ended + (ended - started) / MAX_WAIT_SHARE
        return not self._is_down
