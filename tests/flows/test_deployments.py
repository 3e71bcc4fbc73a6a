"""The shipped deployments on a real Prefect server with a real process worker."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from mlflow.tracking import MlflowClient

from flows.config import RunConfig
from tasks.comparison import read_variants

REPOSITORY = Path(__file__).resolve().parents[2]
PREFECT = str(Path(sys.executable).with_name("prefect"))


def deployments() -> dict[str, dict]:
    content = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())
    return {deployment["name"]: deployment for deployment in content["deployments"]}


def test_deployments_start_from_the_demo_run_file() -> None:
    demo = yaml.safe_load((REPOSITORY / "infra/runs/demo.yaml").read_text())
    assert deployments()["finetune"]["parameters"]["run"] == demo
    assert deployments()["profile"]["parameters"] == {"run": demo, "force": True}
    nightly = RunConfig.model_validate(deployments()["nightly"]["parameters"]["run"])
    assert nightly.training.allows_failures
    assert nightly.tenants == RunConfig.model_validate(demo).tenants
    compare = deployments()["compare"]["parameters"]
    assert compare["run"] == demo
    assert len(read_variants(compare["strategies"], nightly.planner)) == 4


@contextmanager
def process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen]:
    """A server or worker with all its children, ended by process id."""
    with log.open("w") as output:
        child = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent)
    try:
        yield child
    finally:
        family = [*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)]
        child.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=15)
        for survivor in alive:
            survivor.kill()


def wait_until(is_true: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not happen within {seconds:.0f} s")
        time.sleep(0.5)


@pytest.fixture
def served(workspace: Path) -> Iterator[dict[str, str]]:
    """A Prefect server with the pool `local` and a worker; yields the environment that reaches it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = workspace / "prefect"
    home.mkdir()
    environment = {
        **os.environ,
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "true",
        "LOBRA_HOME": str(workspace),
        "LOBRA_DATA_ROOTS": "/",
        "PYTHONPATH": str(REPOSITORY),
    }
    server = [PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port)]

    def healthy() -> bool:
        try:
            return httpx.get(f"{environment['PREFECT_API_URL']}/health").is_success
        except httpx.TransportError:
            return False

    with process(server, environment, home / "server.log"):
        wait_until(healthy, 90, "the server's start")
        create = [PREFECT, "work-pool", "create", "local", "--type", "process"]
        subprocess.run(create, env=environment, check=True, capture_output=True)
        with process([PREFECT, "worker", "start", "--pool", "local"], environment, home / "worker.log"):
            yield environment


def test_a_deployment_runs_with_a_changed_parameter_and_its_mlflow_runs_are_found(
    served, run_content, workspace: Path
) -> None:
    (workspace / "flows").symlink_to(REPOSITORY / "flows")
    command = [PREFECT, "--no-prompt", "deploy", "--all", "--prefect-file", str(REPOSITORY / "prefect.yaml")]
    deployed = subprocess.run(command, env=served, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    with httpx.Client(base_url=served["PREFECT_API_URL"]) as api:
        deployment = api.get("/deployments/name/finetune/finetune").raise_for_status().json()
        run_content["planner"] = {"num_buckets": 5}  # as a person would in the form
        body = {"parameters": {"run": run_content}, "state": {"type": "SCHEDULED"}}
        created = api.post(f"/deployments/{deployment['id']}/create_flow_run", json=body).raise_for_status().json()

        def ended() -> bool:
            return api.get(f"/flow_runs/{created['id']}").json()["state"]["type"] in ("COMPLETED", "FAILED", "CRASHED")

        wait_until(ended, 150, "the flow run's end")
        flow_run = api.get(f"/flow_runs/{created['id']}").json()
    log = (workspace / "prefect" / "worker.log").read_text()
    assert flow_run["state"]["type"] == "COMPLETED", re.sub(r"\x1b\[[0-9;]*m", "", log)[-3000:]
    folder = workspace / "runs" / created["id"]
    assert json.loads((folder / "summary.json").read_text())["tenants"]["long"]["status"] == "finished"
    client = MlflowClient(run_content["tracking"]["mlflow_uri"])
    experiment = client.get_experiment_by_name("tests")
    runs = client.search_runs([experiment.experiment_id], f"tags.`prefect.flow_run_id` = '{created['id']}'")
    assert sorted(run.data.tags["kind"] for run in runs) == ["joint", "tenant", "tenant"]
    parent = next(run for run in runs if run.data.tags["kind"] == "joint")
    assert parent.data.params["num_buckets"] == "5"
