"""A run with held-out rows: a tenant stops early and is published while the other still trains."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from typer.testing import CliRunner

from data_prep.names import folder_name
from flows import cli
from flows.config import RunConfig
from flows.finetune import finetune
from tasks.run_folder import RunFolder
from tasks.run_status import read_status
from tasks.tracking import Tracker
from training.journal import effective_evaluations, read_journal

pytestmark = pytest.mark.usefixtures("prefect_server")

LATE_STEP = 6  # of the tenant that goes on; the other has ended after three steps


@pytest.fixture
def evaluated(run_content: dict) -> RunConfig:
    """`short` cannot improve by as much as it should, `long` is evaluated every four steps."""
    sections = ({"every": 1, "patience": 2, "min_delta": 100.0}, {"every": 4})
    for tenant, evaluation, steps in zip(run_content["tenants"], sections, (20, 8), strict=True):
        tenant |= {"evaluation": evaluation, "steps": steps}
        tenant["dataset"]["evaluation_ratio"] = 0.4
    return RunConfig.model_validate(run_content)


@pytest.fixture
def at_late_step(monkeypatch) -> Callable[[Callable[[], None]], None]:
    """`at_late_step(act)`: the run calls `act` at its late step, and goes on when it returns."""
    log_step = Tracker.log_step

    def install(act: Callable[[], None]) -> None:
        def log(self: Tracker, record: dict) -> None:
            log_step(self, record)
            if record["event"] == "step" and record["step"] == LATE_STEP:
                act()

        monkeypatch.setattr(Tracker, "log_step", log)

    return install


def wait_for(path: Path, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def identity(folder: RunFolder, tenant: str) -> Iterator[tuple[str, int, bytes]]:
    """Names, inodes and contents of a published adapter: a folder written anew has other inodes."""
    for path in sorted(folder.adapter(tenant).iterdir()):
        yield path.name, path.stat().st_ino, path.read_bytes()


def test_a_tenant_that_stops_early_is_published_while_the_other_trains_and_only_once(
    evaluated: RunConfig, at_late_step, workspace: Path
) -> None:
    folder = RunFolder(workspace / "runs" / "tiny")
    seen: dict = {}

    def look() -> None:
        wait_for(folder.publication("short"))
        seen["status"] = read_status(folder.path)
        seen["files"] = list(identity(folder, "short"))
        seen["adapters"] = [path.name for path in (folder.path / "adapters").iterdir()]

    at_late_step(look)
    summary = finetune(run=evaluated, run_dir=folder.path)

    assert seen["adapters"] == [folder_name("short")]
    assert seen["status"]["tenants"]["short"]["status"] == "stopped_early"
    assert seen["status"]["tenants"]["short"]["adapter_path"] == str(folder.adapter("short"))
    assert seen["status"]["tenants"]["long"]["adapter_path"] is None
    assert list(identity(folder, "short")) == seen["files"]
    assert not folder.staging.exists()

    short, long = summary["tenants"]["short"], summary["tenants"]["long"]
    assert (short["status"], short["steps"], short["num_evaluations"]) == ("stopped_early", 3, 3)
    assert short["reason"].startswith("evaluation loss did not improve in 2 evaluations; the best was")
    assert short["published_step"] == short["best_evaluation_step"]
    assert (long["status"], long["steps"], long["num_evaluations"]) == ("finished", 8, 2)
    for tenant in (short, long):
        assert 0 <= tenant["probe"]["error"] < 1e-3 < tenant["probe"]["effect"]
    assert_tracked(evaluated, folder)

    page = folder.report.read_text()
    assert "stopped early" in page
    assert f"at step {long['best_evaluation_step']}" in page
    shown = CliRunner().invoke(cli.app, ["status", str(folder.path), "--json"])
    assert "stopped_early" in shown.output


def assert_tracked(run: RunConfig, folder: RunFolder) -> None:
    client = MlflowClient(run.tracking.mlflow_uri)
    ids = json.loads((folder.path / "mlflow.json").read_text())
    evaluations = effective_evaluations(read_journal(folder.steps))
    assert [record["step"] for record in evaluations] == [1, 2, 3, 4, 8]
    for name in ("short", "long"):
        child = client.get_run(ids["tenants"][name]["run_id"])
        assert child.info.status == "FINISHED"  # also the one that stopped early: a success
        wanted = [(r["step"], r["tenants"][name]["loss"]) for r in evaluations if name in r["tenants"]]
        for run_id, metric in (
            (child.info.run_id, "evaluation_loss"),
            (ids["parent"]["run_id"], f"evaluation_loss/{name}"),
        ):
            found = [(p.step, p.value) for p in client.get_metric_history(run_id, metric)]
            assert sorted(found) == wanted
        version = client.get_model_version_by_alias(f"tests.{folder_name(name)}", "champion")
        assert version.run_id == child.info.run_id
    assert client.get_run(ids["tenants"]["short"]["run_id"]).data.tags["status"] == "stopped_early"


@pytest.mark.slow
def test_a_resumed_run_keeps_what_was_published_before_it_was_interrupted(
    evaluated: RunConfig, at_late_step, workspace: Path
) -> None:
    folder = RunFolder(workspace / "runs" / "tiny")
    seen = []

    def interrupt() -> None:
        wait_for(folder.publication("short"))
        seen.extend(identity(folder, "short"))
        at_late_step(lambda: None)
        raise KeyboardInterrupt

    at_late_step(interrupt)
    with pytest.raises(KeyboardInterrupt):
        finetune(run=evaluated, run_dir=folder.path)
    summary = finetune(run=evaluated, run_dir=folder.path)
    assert list(identity(folder, "short")) == seen
    assert {name: tenant["status"] for name, tenant in summary["tenants"].items()} == {
        "short": "stopped_early",
        "long": "finished",
    }


@pytest.mark.slow
def test_an_interrupted_run_does_not_wait_for_a_probe_and_publishes_at_its_end(
    evaluated: RunConfig, at_late_step, workspace: Path
) -> None:
    folder, asked = RunFolder(workspace / "runs" / "tiny"), []

    def interrupt() -> None:
        wait_for(folder.staging / f"{folder_name('short')}.safetensors")
        asked.append(time.monotonic())
        at_late_step(lambda: None)
        raise KeyboardInterrupt

    at_late_step(interrupt)
    with pytest.raises(KeyboardInterrupt):
        finetune(run=evaluated, run_dir=folder.path)
    assert time.monotonic() - asked[0] < 15
    assert not folder.adapter("short").exists()
    summary = finetune(run=evaluated, run_dir=folder.path)
    assert summary["tenants"]["short"]["adapter_path"] == str(folder.adapter("short"))
    assert folder.adapter("short").is_dir()
