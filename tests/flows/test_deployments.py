"""The shipped deployments on a real Prefect server with a real process worker."""

import json
import re
import time
from pathlib import Path

import httpx
import yaml
from mlflow.tracking import MlflowClient

from flows.config import RunConfig
from tasks.comparison import read_variants

REPOSITORY = Path(__file__).resolve().parents[2]


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


def test_a_deployment_runs_with_a_changed_parameter_and_its_mlflow_runs_are_found(
    worker_api: httpx.Client, run_content, workspace: Path
) -> None:
    run_content["planner"] = {"num_buckets": 5}  # as a person would in the form
    deployment = worker_api.get("/deployments/name/finetune/finetune").raise_for_status().json()
    body = {"parameters": {"run": run_content}, "state": {"type": "SCHEDULED"}}
    created = worker_api.post(f"/deployments/{deployment['id']}/create_flow_run", json=body).raise_for_status().json()

    def state() -> str:
        return worker_api.get(f"/flow_runs/{created['id']}").json()["state"]["type"]

    deadline = time.monotonic() + 150
    while state() not in ("COMPLETED", "FAILED", "CRASHED"):
        assert time.monotonic() < deadline, f"the flow run is still {state()}"
        time.sleep(0.5)
    log = (workspace / "prefect" / "worker.log").read_text()
    assert state() == "COMPLETED", re.sub(r"\x1b\[[0-9;]*m", "", log)[-3000:]
    folder = workspace / "runs" / created["id"]
    assert json.loads((folder / "summary.json").read_text())["tenants"]["long"]["status"] == "finished"
    client = MlflowClient(run_content["tracking"]["mlflow_uri"])
    experiment = client.get_experiment_by_name("tests")
    runs = client.search_runs([experiment.experiment_id], f"tags.`prefect.flow_run_id` = '{created['id']}'")
    assert sorted(run.data.tags["kind"] for run in runs) == ["joint", "tenant", "tenant"]
    parent = next(run for run in runs if run.data.tags["kind"] == "joint")
    assert parent.data.params["num_buckets"] == "5"
