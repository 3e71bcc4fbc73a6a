"""The flow `finetune` on a real Prefect server, a real fleet and a real MLflow store."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient
from peft import PeftModel
from prefect import get_client
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from data_prep.names import folder_name
from flows.cli import app
from flows.config import RunConfig
from flows.finetune import finetune
from flows.track import track
from flows.trained_adapter import export_trained, find_trained
from planning.errors import InputError, LobraError
from tasks.run_status import read_status
from training.base_model import read_base_model
from training.journal import effective_steps, read_journal
from training.merge import merge
from training.peft_export import export_adapter

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def finished(tiny_run: Callable[..., RunConfig], workspace: Path) -> tuple[RunConfig, Path, dict]:
    run = tiny_run()
    folder = workspace / "runs" / "tiny"
    return run, folder, finetune(run=run, run_dir=folder)


def test_two_tenants_become_adapters_that_peft_loads_with_costs_in_mlflow(finished) -> None:
    run, folder, summary = finished
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert summary["plan"] == "<2,1>x1 + <1,1>x1"
    assert {name: tenant["status"] for name, tenant in summary["tenants"].items()} == {
        "short": "finished",
        "long": "finished",
    }
    tokens = torch.arange(5, 25)[None]
    base = AutoModelForCausalLM.from_pretrained(run.base_model.path, dtype=torch.float32)
    with torch.no_grad():
        plain = base(tokens).logits
        for tenant in summary["tenants"].values():
            adapted = PeftModel.from_pretrained(
                AutoModelForCausalLM.from_pretrained(run.base_model.path), tenant["adapter_path"]
            )
            assert (adapted(tokens).logits - plain).abs().max() > 1e-4
    bill = sum(tenant["gpu_seconds"] for tenant in summary["tenants"].values())
    assert bill == pytest.approx(summary["gpu_seconds"])
    for tenant in summary["tenants"].values():
        assert 0 <= tenant["probe"]["error"] < 1e-3 < tenant["probe"]["effect"]
    assert_tracked(run, folder, summary)
    assert_registered(run, folder, summary)
    assert_exported_and_merged(run, folder, summary)
    assert_shown_on_the_run_page()
    assert read_status(folder)["stage"] == "finished"


def assert_tracked(run: RunConfig, folder: Path, summary: dict, by_flow: bool = True) -> None:
    client = MlflowClient(run.tracking.mlflow_uri)
    ids = json.loads((folder / "mlflow.json").read_text())
    parent = client.get_run(ids["parent"]["run_id"])
    assert (parent.info.status, parent.data.tags["kind"]) == ("FINISHED", "joint")
    assert parent.data.params["plan"] == summary["plan"]
    assert ("prefect.flow_run_id" in parent.data.tags) == by_flow
    steps = effective_steps(read_journal(folder / "steps.jsonl"))
    for metric in (
        "gpu_seconds/total",
        "gpu_seconds/short",
        "loss/long",
        "padding_ratio",
        "imbalance",
        "predicted_step_seconds",
        "measured_step_seconds",
        "dispatch_milliseconds",
        "tokens",
    ):
        assert len(client.get_metric_history(parent.info.run_id, metric)) == len(steps), metric
    assert {file.path for file in client.list_artifacts(parent.info.run_id, "figures")} >= {
        "figures/plan.png",
        "figures/lengths.png",
    }
    assert [file.path for file in client.list_artifacts(parent.info.run_id, "report")] == ["report/report.html"]
    child = client.get_run(ids["tenants"]["short"]["run_id"])
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    for metric in ("loss", "learning_rate"):
        values = [point.value for point in client.get_metric_history(child.info.run_id, metric)]
        assert values == [step["tenants"]["short"][metric] for step in steps]
    adapter = {file.path for file in client.list_artifacts(child.info.run_id, "adapter")}
    assert adapter == {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}


def assert_exported_and_merged(run: RunConfig, folder: Path, summary: dict) -> None:
    trained = find_trained(folder, "short", None)
    assert trained.checkpoint.step == 4
    assert export_trained(trained, folder / "out").has_passed
    published = Path(summary["tenants"]["short"]["adapter_path"])
    assert {file.name: file.read_bytes() for file in (folder / "out").iterdir()} == {
        file.name: file.read_bytes() for file in published.iterdir()
    }
    base = read_base_model(run.base_model)
    merge(trained.checkpoint, base, trained.tenant, folder / "merged")
    load = AutoModelForCausalLM.from_pretrained
    tokens = torch.arange(5, 25)[None]
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(load(base.folder, dtype=torch.float32), published)(tokens).logits
        merged = load(folder / "merged", dtype=torch.float32)(tokens).logits
    assert torch.allclose(merged, adapted, atol=1e-5)


def assert_registered(run: RunConfig, folder: Path, summary: dict) -> None:
    client = MlflowClient(run.tracking.mlflow_uri)
    ids = json.loads((folder / "mlflow.json").read_text())
    for name in summary["tenants"]:
        version = client.get_model_version_by_alias(f"tests.{folder_name(name)}", "champion")
        assert version.run_id == ids["tenants"][name]["run_id"]
        tags = {"tenant": name, "rank": "4", "plan": summary["plan"], "joint_run_id": ids["parent"]["run_id"]}
        assert tags.items() <= version.tags.items()


@pytest.mark.slow
def test_an_adapter_that_fails_its_probe_is_taken_away_and_not_registered(
    tiny_run, workspace: Path, monkeypatch
) -> None:
    def export_distorted(*arguments: Any) -> Path:
        folder = export_adapter(*arguments)
        if folder.name.startswith("long"):
            config = folder / "adapter_config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 1}))
        return folder

    monkeypatch.setattr("tasks.adapters.export_adapter", export_distorted)
    run, folder = tiny_run(), workspace / "runs" / "distorted"
    summary = finetune(run=run, run_dir=folder)
    assert summary["tenants"]["short"]["status"] == "finished"
    distorted = summary["tenants"]["long"]
    assert (distorted["status"], distorted["adapter_path"]) == ("failed", None)
    assert "off the trained adapter's" in distorted["reason"]
    assert [path.name for path in (folder / "adapters").iterdir()] == [folder_name("short")]
    models = MlflowClient(run.tracking.mlflow_uri).search_registered_models()
    assert [model.name for model in models] == [f"tests.{folder_name('short')}"]


@pytest.mark.slow
def test_a_run_that_mlflow_missed_is_sent_and_registered_later(tiny_run, workspace: Path) -> None:
    away = tiny_run(tracking={"mlflow_uri": "http://127.0.0.1:9", "experiment": "tests"})
    folder = workspace / "runs" / "missed"
    summary = finetune(run=away, run_dir=folder)
    assert {tenant["status"] for tenant in summary["tenants"].values()} == {"finished"}
    with pytest.raises(LobraError, match="did not take all"):
        track(away, folder)
    run = tiny_run()
    track(run, folder)
    assert track(run, folder) == json.loads((folder / "mlflow.json").read_text())["parent"]["run_id"]
    assert_tracked(run, folder, summary, by_flow=False)
    assert_registered(run, folder, summary)
    client = MlflowClient(run.tracking.mlflow_uri)
    assert len(client.search_model_versions(f"name = 'tests.{folder_name('short')}'")) == 1
    with pytest.raises(InputError, match="no finished run lies here"):
        track(run, workspace / "runs" / "none")


def assert_shown_on_the_run_page() -> None:
    with get_client(sync_client=True) as client:
        artifacts = client.read_artifacts()
    assert {artifact.key for artifact in artifacts} >= {
        "lengths",
        "plan",
        "training",
        "result",
        "tenants",
        "balance",
        "report",
    }


def test_a_finished_folder_is_refused_and_left_as_it_is(tiny_run, workspace: Path) -> None:
    folder = workspace / "runs" / "tiny"
    folder.mkdir(parents=True)
    for name in ("config.json", "summary.json"):
        (folder / name).write_text("{}")
    with pytest.raises(InputError, match="this run is finished; add --fresh"):
        finetune(run=tiny_run(), run_dir=folder)
    assert (folder / "summary.json").read_text() == "{}"


def test_a_tenant_with_a_bad_file_ends_the_run_and_leaves_nothing_in_the_way(tiny_run, workspace: Path) -> None:
    (workspace / "long.jsonl").write_text("")
    folder = workspace / "runs" / "bad"
    with pytest.raises(InputError, match=r"tenant 'long'.*long\.jsonl"):
        finetune(run=tiny_run(), run_dir=folder)
    assert not (folder / "config.json").exists()
    assert not (folder / "summary.json").exists()


def test_a_tenant_with_a_bad_file_is_skipped_when_asked_and_the_other_is_trained(tiny_run, workspace: Path) -> None:
    (workspace / "long.jsonl").write_text("")
    run = tiny_run(training={"on_tenant_error": "skip"})
    summary = finetune(run=run, run_dir=workspace / "runs" / "skip")
    assert summary["tenants"]["short"]["status"] == "finished"
    skipped = summary["tenants"]["long"]
    assert (skipped["status"], skipped["adapter_path"]) == ("skipped", None)
    assert "long.jsonl" in skipped["reason"]


@pytest.mark.slow
def test_an_interrupted_flow_resumes_in_its_folder_to_the_same_adapters(
    finished, tiny_run, workspace: Path, monkeypatch
) -> None:
    run, whole, _ = finished
    folder = workspace / "runs" / "again"
    from tasks.tracking import Tracker

    log_step = Tracker.log_step

    def interrupt(self: Tracker, record: dict) -> None:
        log_step(self, record)
        if record["event"] == "step" and record["step"] == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(Tracker, "log_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            finetune(run=run, run_dir=folder)
    assert read_status(folder)["stage"].startswith("stopped")
    changed = run.model_copy(update={"planner": run.planner.model_copy(update={"num_buckets": 3})})
    with pytest.raises(InputError, match=r"planner\.num_buckets"):
        finetune(run=changed, run_dir=folder)
    finetune(run=run, run_dir=folder)
    for adapter in (whole / "adapters").glob("*/adapter_model.safetensors"):
        assert (folder / "adapters" / adapter.parent.name / adapter.name).read_bytes() == adapter.read_bytes()


@pytest.mark.slow
def test_a_tenant_goes_on_from_an_adapter_that_another_run_exported(finished, run_content, workspace: Path) -> None:
    _, folder, before = finished
    exported = CliRunner().invoke(app, ["export", str(folder), "short", "out", "--step", "4"], catch_exceptions=False)
    assert "Adapter of short after 4 steps (changes the logits by" in exported.output
    merged = CliRunner().invoke(app, ["merge", str(folder), "short", "merged"], catch_exceptions=False)
    assert "Merged model of short after 4 steps: merged" in merged.output
    run_content["tenants"][0]["adapter"] = {**run_content["tenants"][0]["adapter"], "initial_adapter": "out"}
    after = finetune(run=RunConfig.model_validate(run_content), run_dir=workspace / "runs" / "continued")
    first = [
        effective_steps(read_journal(path / "steps.jsonl"))[0]["tenants"]
        for path in (folder, workspace / "runs" / "continued")
    ]
    assert first[1]["short"]["loss"] < first[0]["short"]["loss"]
    assert first[1]["long"]["loss"] == pytest.approx(first[0]["long"]["loss"], rel=1e-5)
    assert after["tenants"]["short"]["last_loss"] < before["tenants"]["short"]["last_loss"]


SHARED_DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


REAL_DATA = {
    "gsm8k": {"path": "gsm8k/train.jsonl", "prompt_column": "question", "response_column": "answer"},
    "tinker": {"path": "tinker_conversations/conversations.jsonl", "messages_column": "messages"},
    "pubmedqa": {
        "path": "pubmedqa/ori_pqal.json",
        "format": "json_by_id",
        "prompt_template": "{{ CONTEXTS | join(' ') }} {{ QUESTION }}",
        "response_template": "{{ LONG_ANSWER }} {{ final_decision }}",
    },
    "gpteacher": {
        "path": "gpteacher_codegen/codegen-instruct.json",
        "format": "json",
        "instruction_column": "instruction",
    },
    "aci_bench": {
        "path": "aci_bench/train.csv",
        "format": "csv",
        "prompt_template": "{{ dialogue[:400] }}",  # the whole dialogues are too long for the tiny model
        "response_template": "{{ note[:200] }}",
    },
}


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="public data sets are not at hand")
def test_five_public_data_sets_in_their_own_formats_train_together(run_content, workspace: Path) -> None:
    common = {**run_content["tenants"][0], "steps": 2, "batch_size": 3}
    run_content["tenants"] = [
        {
            **common,
            "name": name,
            "dataset": {
                **dataset,
                "path": str(SHARED_DATA / dataset["path"]),
                "max_length": 1024,
                "max_drop_ratio": 0.98,  # the test tokenizer makes many tokens of real text
            },
        }
        for name, dataset in REAL_DATA.items()
    ]
    summary = finetune(run=RunConfig.model_validate(run_content), run_dir=workspace / "runs" / "real")
    assert {name: t["status"] for name, t in summary["tenants"].items()} == dict.fromkeys(REAL_DATA, "finished")
    assert summary["tenants"]["tinker"]["num_rejects"] == 0
