import logging
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID
from pydantic import ValidationError

from data_prep.names import folder_name
from tasks.tracking import RunIdentity, Tracker, sweep_stale_runs
from tasks.tracking_config import TrackingConfig
from tasks.tracking_metrics import Point, metric_part, point_batches

UNREACHABLE = TrackingConfig(mlflow_uri="http://127.0.0.1:9")


def track(config, identity, records):
    with Tracker(config, identity) as tracker:
        for record in records:
            tracker.log_step(record)


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return process.pid


def test_a_run_has_a_parent_and_a_child_per_tenant(config, identity, journal, step_record, all_runs, points):
    track(config, identity, journal(*(step_record(step, loss=3.0 - step) for step in range(3))))

    runs = all_runs()
    assert set(runs) == {"nightly", "chat", "code"}
    parent, child = runs["nightly"], runs["chat"]
    assert parent.data.tags["kind"] == "joint"
    assert parent.data.params == {"strategy": "lobra"}
    assert child.data.tags["kind"] == "tenant"
    assert child.data.tags["tenant"] == "chat"
    assert child.data.tags[MLFLOW_PARENT_RUN_ID] == parent.info.run_id
    assert child.data.params == {"rank": "8"}
    assert {run.data.tags["prefect.flow_run_id"] for run in runs.values()} == {"f1"}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert points("nightly", "loss/chat") == points("chat", "loss") == [(0, 3.0), (1, 2.0), (2, 1.0)]
    assert points("nightly", "gpu_seconds/code") == points("code", "gpu_seconds") == [(0, 2.0), (1, 2.0), (2, 2.0)]
    assert points("nightly", "gpu_seconds/total")[0] == (0, 3.0)
    expected = {"tokens", "padding_ratio", "imbalance", "predicted_step_seconds", "measured_step_seconds"}
    assert expected | {"dispatch_milliseconds", "plan_wait_seconds", "sync_seconds"} <= set(parent.data.metrics)


def test_ten_steps_are_sent_together_while_the_run_goes_on(config, identity, journal, step_record, points, monkeypatch):
    monkeypatch.setattr("tasks.tracking.FLUSH_SECONDS", 1e9)
    monkeypatch.setattr("tasks.tracking.MAX_WAIT_SHARE", 1e9)
    num_points = []
    with Tracker(config, identity) as tracker:
        for step in range(11):
            tracker.log_step(*journal(step_record(step)))
            num_points.append(len(points("nightly", "tokens")))

    assert num_points == [0] * 9 + [10, 10]


def test_a_resumed_run_continues_the_same_mlflow_runs_without_doubled_points(
    config, identity, journal, step_record, all_runs, points
):
    def lose_a_gpu():
        yield from journal(*(step_record(step) for step in range(5)))
        raise RuntimeError("lost a GPU")

    with pytest.raises(RuntimeError, match="lost a GPU"):
        track(config, identity, lose_a_gpu())
    before = {name: run.info.run_id for name, run in all_runs().items()}
    assert {run.info.status for run in all_runs().values()} == {"FAILED"}

    track(config, identity, journal(*(step_record(step, loss=1.0) for step in range(3, 8))))  # 3 and 4 are redone

    assert {name: run.info.run_id for name, run in all_runs().items()} == before
    assert {run.info.status for run in all_runs().values()} == {"FINISHED"}
    assert points("nightly", "loss/chat") == [(step, 2.0 if step < 5 else 1.0) for step in range(8)]
    assert [step for step, _ in points("code", "loss")] == list(range(8))


def evaluation(step: int, **losses: float) -> dict:
    results = {
        name: {"loss": loss, "perplexity": math.exp(loss), "num_supervised_tokens": 9, "tenant_step": step}
        for name, loss in losses.items()
    }
    return {"event": "evaluation", "step": step, "time": 1.7e9 + step, "tenants": results, "overhead_gpu_seconds": 0.1}


def test_evaluations_go_to_parent_and_child_and_a_resumed_run_doubles_none(
    config, identity, journal, step_record, points
):
    first = (step_record(0), step_record(1), evaluation(2, chat=3.0, code=4.0))
    track(config, identity, journal(*first))
    redone = (step_record(1), evaluation(2, chat=3.0, code=4.0), step_record(2), evaluation(3, chat=2.5))
    track(config, identity, journal(*redone))

    assert points("chat", "evaluation_loss") == points("nightly", "evaluation_loss/chat") == [(2, 3.0), (3, 2.5)]
    assert points("code", "evaluation_perplexity") == [(2, math.exp(4.0))]
    assert [step for step, _ in points("chat", "loss")] == [0, 1, 2]


def test_evaluations_that_a_killed_run_never_sent_are_read_from_steps_jsonl(
    config, identity, journal, step_record, points
):
    journal(step_record(0), evaluation(1, chat=9.0), step_record(0), evaluation(1, chat=1.5))

    track(config, identity, [])

    assert points("chat", "evaluation_loss") == [(1, 1.5)]


def test_steps_that_a_killed_run_never_sent_are_read_from_steps_jsonl(config, identity, journal, step_record, points):
    journal(step_record(0), {"event": "checkpoint", "step": 1}, step_record(1, loss=9.0), step_record(1, loss=1.5))

    track(config, identity, [])

    assert points("chat", "loss") == [(0, 2.0), (1, 1.5)]


def test_an_unreachable_server_costs_one_warning_and_its_steps_arrive_later(
    config, identity, journal, step_record, points, caplog
):
    with caplog.at_level(logging.WARNING, "tasks.tracking"):
        track(UNREACHABLE, identity, journal(*(step_record(step) for step in range(25))))
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 2
    assert "training goes on" in warnings[0]
    assert "later: lobra track" in warnings[1]

    track(config, identity, journal(step_record(25)))

    assert [step for step, _ in points("nightly", "tokens")] == list(range(26))
    assert [step for step, _ in points("chat", "loss")] == list(range(26))


def test_a_store_that_comes_back_during_the_run_gets_everything(config, identity, journal, step_record, points):
    database = Path(config.mlflow_uri.removeprefix("sqlite:///"))
    database.mkdir(parents=True)  # a folder cannot be opened as a database
    started = time.monotonic()
    with Tracker(config, identity) as tracker:
        for step in range(12):
            tracker.log_step(*journal(step_record(step)))
        tracker.log_histogram(pl.DataFrame({"tenant": ["chat"], "length": [5], "count": [2]}))
        assert tracker.parent_run_id is None
        assert time.monotonic() - started < 30  # mlflow alone would try for 100 seconds
        database.rmdir()

    assert [step for step, _ in points("chat", "loss")] == list(range(12))
    run = MlflowClient(config.mlflow_uri).get_run(tracker.parent_run_id)
    assert run.info.status == "FINISHED"


def test_after_a_failure_mlflow_is_left_alone_for_a_while(identity, journal, step_record, failing_server):
    with Tracker(failing_server.config, identity) as tracker:
        for step in range(25):
            tracker.log_step(*journal(step_record(step)))
        tracker.log_histogram(pl.DataFrame({"tenant": ["chat"], "length": [5], "count": [2]}))
        assert failing_server.num_requests == 1

    assert failing_server.num_requests == 2


def test_runs_that_mlflow_no_longer_has_are_made_anew_with_all_their_steps(
    config, identity, journal, step_record, points
):
    track(config, identity, journal(step_record(0)))
    Path(config.mlflow_uri.removeprefix("sqlite:///")).unlink()
    other = config.model_copy(update={"mlflow_uri": config.mlflow_uri.replace("mlflow.db", "other.db")})

    track(other, identity, journal(step_record(1)))

    client = MlflowClient(other.mlflow_uri)
    runs = client.search_runs([client.get_experiment_by_name("lobra").experiment_id])
    assert len(runs) == 3
    parent = next(run for run in runs if run.data.tags["kind"] == "joint")
    assert [point.step for point in client.get_metric_history(parent.info.run_id, "tokens")] == [0, 1]


@pytest.mark.parametrize(("error", "status"), [(ValueError("bad"), "FAILED"), (KeyboardInterrupt(), "KILLED")])
def test_the_runs_end_as_the_training_ended(config, identity, all_runs, error, status):
    with pytest.raises(type(error)), Tracker(config, identity):
        raise error

    assert {run.info.status for run in all_runs().values()} == {status}


@pytest.mark.parametrize("success", ["finished", "stopped_early"])
def test_the_summary_becomes_totals_and_marks_a_quarantined_tenant_as_failed(success, config, identity, all_runs):
    chat = {"status": success, "tokens": 40, "gpu_seconds": 3.0, "first_loss": 2.0, "last_loss": 1.0, "reason": ""}
    code = chat | {"status": "quarantined", "last_loss": None, "reason": "3 non-finite updates in a row"}
    summary = {"schema_version": 1, "plan": "<1,1>x2", "gpu_seconds": 6.0, "overhead_gpu_seconds": 1.5, "gap": 0.05}
    with Tracker(config, identity) as tracker:
        tracker.log_summary(summary | {"tenants": {"chat": chat, "code": code}})

    runs = all_runs()
    assert runs["nightly"].data.metrics == {
        "summary/gpu_seconds": 6.0,
        "summary/overhead_gpu_seconds": 1.5,
        "summary/gap": 0.05,
    }
    assert runs["chat"].data.metrics["summary/last_loss"] == 1.0
    assert "summary/last_loss" not in runs["code"].data.metrics
    assert {name: run.info.status for name, run in runs.items()} == {
        "nightly": "FINISHED",
        "chat": "FINISHED",
        "code": "FAILED",
    }
    assert runs["code"].data.tags["status"] == "quarantined"


def test_adapters_figures_and_lengths_go_to_their_runs(config, identity, all_runs, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    figure = tmp_path / "losses.png"
    figure.write_bytes(b"PNG")
    histogram = pl.DataFrame({"tenant": ["chat", "chat", "code"], "length": [5, 9, 700], "count": [2, 1, 4]})
    with Tracker(config, identity) as tracker:
        tracker.log_histogram(histogram)
        tracker.log_artifact_dir("chat", adapter, "adapter")
        tracker.log_file(figure, "figures")

    runs, client = all_runs(), MlflowClient(config.mlflow_uri)
    files = [file.path for file in client.list_artifacts(runs["chat"].info.run_id, "adapter")]
    assert files == ["adapter/adapter_config.json"]
    assert [file.path for file in client.list_artifacts(runs["nightly"].info.run_id, "figures")] == [
        "figures/losses.png"
    ]
    (dataset,) = runs["chat"].inputs.dataset_inputs
    assert dataset.dataset.name == "lengths of chat"
    assert '"num_rows": 2' in dataset.dataset.profile


def test_a_tenant_whose_name_mlflow_refuses_is_tracked_under_its_folder_name(
    config, identity, journal, step_record, points, all_runs
):
    name = "Zürich/Müller & Söhne?"
    odd = RunIdentity("nightly", identity.run_dir, "0", {}, {}, (name,))

    track(config, odd, journal(step_record(0, tenants=(name,))))

    assert points("nightly", f"loss/{folder_name(name)}") == [(0, 2.0)]
    assert all_runs()[name].data.tags["tenant"] == name
    assert metric_part("Plain name-1.2_x") == "Plain name-1.2_x"
    assert metric_part("total") != "total"


def test_a_loss_that_was_not_finite_leaves_a_hole_and_not_an_error(config, identity, journal, step_record, points):
    broken = step_record(1)
    broken["tenants"]["chat"]["loss"] = None

    track(config, identity, journal(step_record(0), broken, step_record(2)))

    assert [step for step, _ in points("chat", "loss")] == [0, 2]
    assert [step for step, _ in points("chat", "tokens")] == [0, 1, 2]


def test_tracking_that_is_off_touches_nothing(config, identity, journal, step_record, tmp_path):
    track(config.model_copy(update={"enabled": False}), identity, journal(step_record(0)))

    assert not (tmp_path / "store").exists()
    assert not (identity.run_dir / "mlflow.json").exists()


def test_only_runs_of_dead_processes_of_this_host_are_swept(config):
    client = MlflowClient(config.mlflow_uri)
    experiment = client.create_experiment(config.experiment)
    pids_and_hosts = {
        "dead": (dead_pid(), socket.gethostname()),
        "alive": (os.getpid(), socket.gethostname()),
        "elsewhere": (dead_pid(), "another-host"),
    }
    ids = {
        name: client.create_run(experiment, tags={"lobra.pid": str(pid), "lobra.host": host}).info.run_id
        for name, (pid, host) in pids_and_hosts.items()
    }

    assert sweep_stale_runs(config) == 1

    statuses = {name: client.get_run(run_id).info.status for name, run_id in ids.items()}
    assert statuses == {"dead": "KILLED", "alive": "RUNNING", "elsewhere": "RUNNING"}


def test_batches_keep_steps_whole_and_in_order():
    points = [
        Point(step, 0.0, dict.fromkeys(names, 1.0)) for step, names in enumerate(["ab", "cde", "f", "ghijklmn", "o"])
    ]

    batches = [[point.step for point in batch] for batch in point_batches(points, 6)]

    assert batches == [[0, 1, 2], [3], [4]]


@pytest.mark.parametrize("uri", ["mlruns", "file:///tmp/mlruns", "", "postgresql://host/db"])
def test_a_store_that_is_not_supported_is_refused_with_what_to_give_instead(uri):
    with pytest.raises(ValidationError, match=r"give sqlite:///mlflow\.db or"):
        TrackingConfig(mlflow_uri=uri)
