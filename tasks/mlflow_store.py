"""Every call to MLflow: runs, metrics, data sets, files. The only module that imports mlflow; see `tracking` for when.

Calls go through an explicit client, so nothing depends on MLflow's global state. No autologging, no telemetry. What
fails raises one of `STORE_ERRORS`, at once: mlflow's own minutes of retries would hold up training.
"""

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import requests
import sqlalchemy
from sqlalchemy.exc import SQLAlchemyError

from tasks.tracking_config import TrackingConfig
from tasks.tracking_metrics import Point

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # these must stand before mlflow is imported
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

import mlflow.data
from mlflow.entities import DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT, MLFLOW_PARENT_RUN_ID

STORE_ERRORS = (MlflowException, SQLAlchemyError, requests.RequestException, OSError)

MAX_METRICS_PER_BATCH = 1000  # MLflow's limits
MAX_PARAMS_PER_BATCH = 100
MAX_RUNS_PER_SEARCH = 10_000
PID_TAG = "lobra.pid"
HOST_TAG = "lobra.host"


@dataclass(frozen=True, slots=True)
class RunSpec:
    """How a run is created: name, parameters, tags, and its parent if it is nested."""

    name: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    parent_run_id: str | None = None


@dataclass(frozen=True, slots=True)
class VersionSpec:
    """A version of a registered model: the files at `artifact_path` of a run, its tags, and the alias it takes."""

    model_name: str
    run_id: str
    artifact_path: str
    tags: Mapping[str, str]
    order_tag: str
    alias: str


class MlflowStore:
    """One experiment of an MLflow store. It is reached, and the experiment made, with the first call."""

    def __init__(self, config: TrackingConfig) -> None:
        self._config = config
        self._reached: tuple[MlflowClient, str] | None = None

    @property
    def experiment_id(self) -> str:
        return self._reach()[1]

    @property
    def _client(self) -> MlflowClient:
        return self._reach()[0]

    def _reach(self) -> tuple[MlflowClient, str]:
        if self._reached is None:
            _check_database(self._config.mlflow_uri)
            client = MlflowClient(self._config.mlflow_uri)
            experiment = client.get_experiment_by_name(self._config.experiment)
            experiment_id = (
                experiment.experiment_id if experiment else client.create_experiment(self._config.experiment)
            )
            self._reached = client, str(experiment_id)
        return self._reached

    def params_of_runs(self, run_ids: Sequence[str]) -> dict[str, frozenset[str]]:
        """Names of the parameters of each of these runs that the experiment still has."""
        if not run_ids:
            return {}
        any_of_them = ", ".join(f"'{run_id}'" for run_id in run_ids)
        runs = self._client.search_runs(
            [self.experiment_id], f"attributes.run_id IN ({any_of_them})", max_results=MAX_RUNS_PER_SEARCH
        )
        return {run.info.run_id: frozenset(run.data.params) for run in runs}

    def create_run(self, spec: RunSpec) -> str:
        """Start a run and return its id; parameters follow with `continue_run`."""
        parent = {MLFLOW_PARENT_RUN_ID: spec.parent_run_id} if spec.parent_run_id else {}
        tags = {**spec.tags, **_process_tags(), **parent}
        return str(self._client.create_run(self.experiment_id, tags=tags, run_name=spec.name).info.run_id)

    def continue_run(self, run_id: str, spec: RunSpec, known_params: Iterable[str]) -> None:
        """Make the run this process's, running, and complete its parameters (MLflow refuses to change one)."""
        self._client.update_run(run_id, status="RUNNING")
        tags = [RunTag(key, value) for key, value in {**spec.tags, **_process_tags()}.items()]
        self._client.log_batch(run_id, tags=tags)
        params = [Param(key, value) for key, value in spec.params.items() if key not in set(known_params)]
        for start in range(0, len(params), MAX_PARAMS_PER_BATCH):
            self._client.log_batch(run_id, params=params[start : start + MAX_PARAMS_PER_BATCH])

    def log_points(self, run_id: str, points: Iterable[Point]) -> None:
        """Write the points in one request, or several if they are more than MLflow takes in one."""
        metrics = [
            Metric(name, value, int(point.time_seconds * 1000), point.step)
            for point in points
            for name, value in point.metrics.items()
        ]
        for start in range(0, len(metrics), MAX_METRICS_PER_BATCH):
            self._client.log_batch(run_id, metrics=metrics[start : start + MAX_METRICS_PER_BATCH])

    def log_lengths(self, run_id: str, name: str, lengths: pl.DataFrame) -> None:
        """A tenant's length histogram (`length, count`) as the data set of its run."""
        dataset = mlflow.data.from_polars(lengths.cast(pl.Int64), name=name)
        tags = [InputTag(MLFLOW_DATASET_CONTEXT, "training")]
        self._client.log_inputs(run_id, [DatasetInput(dataset._to_mlflow_entity(), tags)])

    def log_folder(self, run_id: str, folder: Path, artifact_path: str) -> None:
        self._client.log_artifacts(run_id, str(folder), artifact_path)

    def log_file(self, run_id: str, path: Path, artifact_path: str) -> None:
        self._client.log_artifact(run_id, str(path), artifact_path)

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self._client.set_tag(run_id, key, value)

    def register(self, spec: VersionSpec) -> str:
        """Make a model version of a run's files, unless the run has one; returns it. The alias moves to it unless it
        stands on a version with a later tag `spec.order_tag`, as when an old run is registered late."""
        self._ensure_model(spec.model_name)
        found = self._client.search_model_versions(f"name = '{spec.model_name}' AND run_id = '{spec.run_id}'")
        version = str(found[0].version) if found else self._create_version(spec)
        holder = self._client.get_registered_model(spec.model_name).aliases.get(spec.alias)
        tags = self._client.get_model_version(spec.model_name, str(holder)).tags if holder else {}
        if tags.get(spec.order_tag, "") <= spec.tags[spec.order_tag]:
            self._client.set_registered_model_alias(spec.model_name, spec.alias, version)
        return version

    def _ensure_model(self, name: str) -> None:
        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _create_version(self, spec: VersionSpec) -> str:
        source = f"{self._client.get_run(spec.run_id).info.artifact_uri}/{spec.artifact_path}"
        tags = dict(spec.tags)
        return str(self._client.create_model_version(spec.model_name, source, spec.run_id, tags=tags).version)

    def end_run(self, run_id: str, status: str) -> None:
        """`status` is FINISHED, FAILED or KILLED."""
        self._client.set_terminated(run_id, status)

    def end_stale_runs(self) -> int:
        """End as KILLED the experiment's runs that a dead process of this host left RUNNING; returns how many.

        A process id that another process got since hides its run until that process ends too.
        """
        running_here = f"attributes.status = 'RUNNING' AND tags.\"{HOST_TAG}\" = '{socket.gethostname()}'"
        runs = self._client.search_runs([self.experiment_id], running_here, max_results=MAX_RUNS_PER_SEARCH)
        stale = [run for run in runs if not _is_alive(int(run.data.tags[PID_TAG]))]
        for run in stale:
            self._client.set_terminated(run.info.run_id, "KILLED")
        return len(stale)


def _process_tags() -> dict[str, str]:
    return {PID_TAG: str(os.getpid()), HOST_TAG: socket.gethostname()}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _check_database(uri: str) -> None:
    """Open a SQLite file once: where it cannot be opened, mlflow itself would try for minutes."""
    file = sqlalchemy.make_url(uri).database if uri.startswith("sqlite") else None
    if file:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        engine = sqlalchemy.create_engine(uri)
        engine.connect().close()
        engine.dispose()
