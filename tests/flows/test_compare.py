"""The flow `compare` on a real Prefect server, real fleets and a real MLflow store."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from flows.compare import compare
from flows.config import RunConfig
from planning.errors import InputError
from tasks.run_status import read_status

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]


@pytest.fixture
def compared(tiny_run: Callable[..., RunConfig], workspace: Path) -> tuple[RunConfig, Path, dict]:
    run = tiny_run()
    folder = workspace / "runs" / "tiny-compare"
    return run, folder, compare(run=run, strategies=["lobra", "task_fused"], run_dir=folder)


def test_two_strategies_give_the_same_adapters_and_one_table(compared, workspace: Path) -> None:
    run, folder, comparison = compared
    lobra, fused = comparison["variants"]
    assert [row["variant"] for row in (lobra, fused)] == ["lobra-padded", "task_fused-padded"]
    assert lobra["plan"] == "<2,1>x1 + <1,1>x1"
    assert fused["plan"] == "<2,1>x1"
    assert lobra["simulated_reduction"] == pytest.approx(
        1 - lobra["simulated_gpu_seconds"] / fused["simulated_gpu_seconds"]
    )
    assert len(comparison["adapters"]) == 2
    assert comparison["adapters_within_tolerance"], comparison["adapters"]
    assert json.loads((folder / "comparison.json").read_text()) == comparison
    assert (folder / "comparison.png").stat().st_size > 5_000
    assert "lobra-padded" in (folder / "comparison.md").read_text()
    assert read_status(folder / "lobra-padded")["stage"] == "finished"
    assert_tracked(run, folder)
    times = [path.stat().st_mtime for path in sorted(folder.glob("*/summary.json"))]
    again = compare(run=run, strategies=["lobra", "task_fused"], run_dir=folder)
    assert again == comparison
    assert [path.stat().st_mtime for path in sorted(folder.glob("*/summary.json"))] == times
    changed = run.model_copy(update={"planner": run.planner.model_copy(update={"num_buckets": 3})})
    with pytest.raises(InputError, match=r"planner\.num_buckets; add --fresh"):
        compare(run=changed, strategies=["lobra", "task_fused"], run_dir=folder)


def assert_tracked(run: RunConfig, folder: Path) -> None:
    """One comparison above a joint run per variant, each above its tenants; nothing is registered."""
    client = MlflowClient(run.tracking.mlflow_uri)
    parent_id = json.loads((folder / "mlflow.json").read_text())["run_id"]
    parent = client.get_run(parent_id)
    assert (parent.info.status, parent.data.tags["kind"]) == ("FINISHED", "comparison")
    assert parent.data.metrics["adapters_within_tolerance"] == 1.0
    assert "measured_gpu_seconds/lobra-padded" in parent.data.metrics
    assert "comparison/comparison.png" in {file.path for file in client.list_artifacts(parent_id, "comparison")}
    experiment = client.get_experiment_by_name("tests")
    joint = client.search_runs([experiment.experiment_id], "tags.kind = 'joint'")
    assert {child.data.tags["mlflow.parentRunId"] for child in joint} == {parent_id}
    assert {child.data.params["strategy"] for child in joint} == {"lobra", "task_fused"}
    assert client.search_registered_models() == []


@pytest.mark.timeout(1200)
def test_every_strategy_padded_and_packed_gives_the_same_adapters(tiny_run, workspace: Path) -> None:
    names = ["lobra", "task_fused", "task_sequential", "lobra_sequential"]
    variants = [f"{name}:{batching}" for name in names for batching in ("padded", "packed")]
    comparison = compare(
        run=tiny_run(), strategies=[*variants, "task_fused:padded:fixed"], run_dir=workspace / "runs" / "all"
    )
    assert len(comparison["variants"]) == 9
    assert len(comparison["adapters"]) == 2 * 36
    assert comparison["adapters_within_tolerance"], comparison["adapters"]
    packed = [row for row in comparison["variants"] if row["variant"].endswith("packed")]
    assert {row["padding_ratio"] for row in packed} == {0.0}


def test_a_comparison_evaluates_nobody_so_that_all_variants_train_all_steps(run_content: dict, workspace: Path) -> None:
    for tenant in run_content["tenants"]:
        tenant["dataset"]["evaluation_ratio"] = 0.4
        tenant["evaluation"] = {"every": 1, "patience": 1, "min_delta": 100.0}  # on its own it would stop early
    folder = workspace / "runs" / "tiny-compare"
    run = RunConfig.model_validate(run_content)
    comparison = compare(run=run, strategies=["lobra:packed", "task_fused:packed"], run_dir=folder)
    assert [row["steps"] for row in comparison["variants"]] == [4, 4]
    assert comparison["adapters_within_tolerance"]
    assert {tenant["status"] for tenant in read_status(folder / "lobra-packed")["tenants"].values()} == {"finished"}
