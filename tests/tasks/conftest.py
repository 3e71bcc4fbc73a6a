"""Records of steps.jsonl, and an MLflow store of its own for every test."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run, ViewType
from mlflow.tracking import MlflowClient

from tasks.tracking import RunIdentity
from tasks.tracking_config import TrackingConfig

Record = dict[str, Any]


@pytest.fixture
def step_record() -> Callable[..., Record]:
    def make(step: int, loss: float = 2.0, tenants: tuple[str, ...] = ("chat", "code")) -> Record:
        results = {
            name: {
                "loss": loss + index,
                "num_tokens": 100,
                "num_supervised_tokens": 50,
                "num_sequences": 2,
                "gpu_seconds": 1.0 + index,
                "grad_norm": 0.5,
                "learning_rate": 2e-4,
                "skipped": False,
            }
            for index, name in enumerate(tenants)
        }
        return {
            "schema_version": 1,
            "event": "step",
            "step": step,
            "time": 1.7e9 + step,
            "tenants": results,
            "gpu_seconds": sum(result["gpu_seconds"] for result in results.values()),
            "measured_seconds": 1.0,
            "predicted_seconds": 0.9,
            "lower_bound_seconds": 0.8,
            "replica_seconds": [0.9, 0.6],
            "predicted_replica_seconds": [0.9, 0.9],
            "imbalance": 0.2,
            "padding_ratio": 0.1,
            "dispatch_milliseconds": 3.0,
            "plan_wait_seconds": 0.0,
            "sync_seconds": 0.001,
            "num_tokens": 100 * len(tenants),
            "num_computed_tokens": 110 * len(tenants),
        }

    return make


@pytest.fixture
def journal(tmp_path: Path) -> Callable[..., list[Record]]:
    """Appends records to steps.jsonl in the run folder, as the controller does, and hands them back."""

    def append(*records: Record) -> list[Record]:
        path = tmp_path / "run" / "steps.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        return list(records)

    return append


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrackingConfig:
    """A SQLite store in the test's folder, where MLflow also puts its artifacts."""
    monkeypatch.chdir(tmp_path)
    return TrackingConfig(mlflow_uri=f"sqlite:///{tmp_path}/store/mlflow.db")


@pytest.fixture
def identity(tmp_path: Path) -> RunIdentity:
    run_dir = tmp_path / "run"
    run_dir.mkdir(exist_ok=True)
    return RunIdentity(
        run_name="nightly",
        run_dir=run_dir,
        config_hash="0123abcd",
        params={"strategy": "lobra"},
        tags={"prefect.flow_run_id": "f1"},
        tenants=("chat", "code"),
        tenant_params={"chat": {"rank": "8"}},
    )


@pytest.fixture
def all_runs(config: TrackingConfig) -> Callable[[], dict[str, Run]]:
    """Every run of the store by its name; fails if two have the same name."""

    def read() -> dict[str, Run]:
        client = MlflowClient(config.mlflow_uri)
        experiment = client.get_experiment_by_name(config.experiment)
        runs = client.search_runs([experiment.experiment_id], run_view_type=ViewType.ALL)
        assert len({run.info.run_name for run in runs}) == len(runs)
        return {run.info.run_name: run for run in runs}

    return read


@pytest.fixture
def points(
    config: TrackingConfig, all_runs: Callable[[], dict[str, Run]]
) -> Callable[[str, str], list[tuple[int, float]]]:
    """All points (step, value) of a metric of a run, in order, doubled ones included."""

    def read(run_name: str, metric: str) -> list[tuple[int, float]]:
        history = MlflowClient(config.mlflow_uri).get_metric_history(all_runs()[run_name].info.run_id, metric)
        return sorted((point.step, point.value) for point in history)

    return read


class FailingServer(ThreadingHTTPServer):
    """A tracking server that answers every request with an error, and counts them."""

    num_requests = 0

    class Handler(BaseHTTPRequestHandler):
        server: "FailingServer"

        def do_GET(self) -> None:
            self.server.num_requests += 1
            self.send_error(500)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Nothing to see."""

    @property
    def config(self) -> TrackingConfig:
        return TrackingConfig(mlflow_uri=f"http://127.0.0.1:{self.server_port}")


@pytest.fixture
def failing_server() -> Iterator[FailingServer]:
    with FailingServer(("127.0.0.1", 0), FailingServer.Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
