"""Evaluation within a training: when, at what cost, what it ends and keeps. Peft and the run without it are oracles."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import AutoModelForCausalLM

from data_prep.names import folder_name
from data_prep.token_file import TokenFile
from planning.config import Batching, ClusterConfig, PlannerConfig
from planning.dispatch import dispatcher_for
from planning.strategies import Phase
from planning.types import Candidate, DeploymentPlan, ParallelConfig, ReplicaGroup
from training import step_planner
from training.checkpoint import Checkpoint, CheckpointStore
from training.config import BaseModelConfig, TenantConfig, TrainingConfig
from training.controller import train
from training.fleet import Fleet
from training.journal import effective_evaluations, effective_steps, overhead_gpu_seconds, read_journal
from training.peft_export import export_adapter
from training.progress import TenantStatus
from training.request import TrainingFiles, TrainingRequest, TrainingResult
from training.step_planner import StepPlanner

SMALL, WIDE = ParallelConfig(1, 1), ParallelConfig(2, 1)
CANDIDATES = (Candidate(SMALL, 64, 1e-3, 1e-5, 0.0), Candidate(WIDE, 160, 1e-3, 7e-6, 0.0))
PLAN = DeploymentPlan((ReplicaGroup(WIDE, 1), ReplicaGroup(SMALL, 1)), 3, 0.01, 0.01, 0.0, {}, (), ())
TRAIN_LENGTHS = {"quick": [12, 20, 33, 9, 25, 40, 17], "long": [60, 100, 130, 75, 150, 90]}
HELD_OUT_LENGTHS = {"quick": [14, 50, 8, 22], "long": [140, 70, 33]}
HOPELESS = {"every": 1, "patience": 2, "min_delta": 100.0}  # nothing improves: it stops after its third evaluation


def tenant(name: str, evaluation: dict | None, steps: int = 8) -> TenantConfig:
    return TenantConfig(
        name=name,
        dataset={"path": "unused", "prompt_column": "p", "response_column": "r", "evaluation_ratio": 0.3},
        adapter={"rank": 4, "alpha": 8, "target_modules": ["q_proj", "o_proj", "up_proj"]},
        optimiser={"learning_rate": 5e-3},
        batch_size=4,
        steps=steps,
        seed=len(name),
        evaluation=evaluation,
    )


@pytest.fixture(scope="module")
def make_request(base_model_folder: Callable[[str], Path], token_path: Callable[..., Path], tmp_path_factory):
    """`make_request(quick, long)`: a training of two tenants with these evaluation sections, in a folder of its own."""

    def build(quick: dict | None, long: dict | None, batching: Batching = Batching.PADDED) -> TrainingRequest:
        root = tmp_path_factory.mktemp("evaluated")
        tenants = (tenant("quick", quick), tenant("long", long))
        paths = [
            {name: token_path(root, f"{name}-{kind}", lengths[name], seed=i) for i, name in enumerate(lengths)}
            for kind, lengths in (("train", TRAIN_LENGTHS), ("held-out", HELD_OUT_LENGTHS))
        ]
        names = ("checkpoints", "steps.jsonl", "plans.jsonl", "logs", "control.json")
        return TrainingRequest(
            files=TrainingFiles(*(root / name for name in names)),
            base_model=BaseModelConfig(path=base_model_folder("llama")),
            tenants=tenants,
            token_paths=paths[0],
            phases=(Phase(("quick", "long"), PLAN),),
            candidates=CANDIDATES,
            cluster=ClusterConfig(num_gpus=3),
            planner=PlannerConfig(num_buckets=4, batching=batching),
            training=TrainingConfig(save_every=5),
            evaluation_paths={t.name: paths[1][t.name] for t in tenants if t.evaluation},
        )

    return build


@pytest.fixture(scope="module")
def stopped(make_request) -> tuple[TrainingRequest, TrainingResult, list[Checkpoint]]:
    """`quick` stops early, `long` is evaluated every three steps and at its end; and the checkpoints in their order."""
    request, checkpoints = make_request(HOPELESS, {"every": 3}, Batching.PACKED), []
    return request, train(request, checkpointed=checkpoints.append), checkpoints


def files_of(result: TrainingResult, kind: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((result.checkpoint.folder / kind).iterdir())}


def evaluations_of(request: TrainingRequest) -> list[tuple[int, dict]]:
    return [(e["step"], e["tenants"]) for e in effective_evaluations(read_journal(request.files.steps))]


def test_tenants_are_evaluated_when_due_and_the_time_is_overhead(stopped) -> None:
    request, _, _ = stopped
    records = read_journal(request.files.steps)
    found = evaluations_of(request)
    assert [(step, sorted(tenants)) for step, tenants in found] == [
        (1, ["quick"]),
        (2, ["quick"]),
        (3, ["long", "quick"]),
        (6, ["long"]),
        (8, ["long"]),
    ]
    for _, tenants in found:
        for result in tenants.values():
            assert result["perplexity"] == pytest.approx(np.exp(result["loss"]))
    assert all(r["overhead_gpu_seconds"] > 0 for r in records if r["event"] == "evaluation")
    steps = effective_steps(records)
    bill = (records[-1]["time"] - records[0]["time"]) * request.cluster.num_gpus + records[0]["overhead_gpu_seconds"]
    assert sum(s["gpu_seconds"] for s in steps) + overhead_gpu_seconds(records) == pytest.approx(bill, rel=0.02)


def test_a_tenant_that_stops_improving_ends_at_once_and_the_others_go_on(stopped) -> None:
    request, result, _ = stopped
    quick, long = result.tenants["quick"], result.tenants["long"]
    assert (quick.status, quick.num_done) == (TenantStatus.STOPPED_EARLY, 3)
    assert quick.reason.startswith("evaluation loss did not improve in 2 evaluations")
    assert (long.status, long.num_done) == (TenantStatus.FINISHED, 8)
    records = read_journal(request.files.steps)
    assert [len(step["tenants"]) for step in effective_steps(records)] == [2] * 3 + [1] * 5
    assert [r["tenant"] for r in records if r["event"] == "stopped_early"] == ["quick"]
    assert effective_steps(records)[-1]["num_steps"] == 8


def test_a_tenant_that_ends_early_is_checkpointed_while_the_others_train(stopped) -> None:
    statuses = [(c.step, c.state["tenants"]["quick"]["status"]) for c in stopped[2]]
    assert statuses == [(3, "stopped_early"), (5, "stopped_early"), (8, "stopped_early")]


def test_the_published_adapter_is_the_one_of_the_lowest_evaluation_loss_as_peft_computes_it(
    stopped, tmp_path: Path, run_ranks
) -> None:
    request, result, _ = stopped

    def loss(own: TenantConfig) -> float:
        exported = export_adapter(result.checkpoint, request.base_model, own, tmp_path / folder_name(own.name))
        base = AutoModelForCausalLM.from_pretrained(request.base_model.path, dtype=torch.float32)
        return peft_loss(PeftModel.from_pretrained(base, exported), TokenFile(request.evaluation_paths[own.name]))

    for own, measured in zip(
        request.tenants, run_ranks(1, lambda _: [loss(t) for t in request.tenants])[0], strict=True
    ):
        best = result.tenants[own.name].evaluations
        assert measured == pytest.approx(best.best_loss, rel=1e-5)
        losses = [tenants[own.name]["loss"] for _, tenants in evaluations_of(request) if own.name in tenants]
        assert best.best_loss == min(losses)


@torch.no_grad()
def peft_loss(model: torch.nn.Module, tokens: TokenFile) -> float:
    """Mean loss over all supervised tokens of a token file, row by row."""
    total = count = 0.0
    for number in range(tokens.num_rows):
        row = tokens.row(number)
        ids = torch.from_numpy(row.input_ids.astype(np.int64))
        labels = torch.full_like(ids, -100)
        for start, end in row.loss_spans:
            labels[start:end] = ids[start:end]
        total += F.cross_entropy(model(ids[None]).logits[0, :-1], labels[1:], reduction="sum").item()
        count += int((labels >= 0).sum())
    return total / count


def test_large_evaluation_sets_are_split_into_plans_that_hold_every_row_once(make_request, monkeypatch) -> None:
    monkeypatch.setattr(step_planner, "EVALUATION_SEQUENCES", 3)
    request = make_request({"every": 1}, {"every": 1})
    files = {name: TokenFile(path) for name, path in request.evaluation_paths.items()}
    by_config = {candidate.config: candidate for candidate in CANDIDATES}
    planner = StepPlanner(PLAN, by_config, dispatcher_for(PLAN, by_config, request.planner), {}, files)
    plans = planner.plan_evaluation(("quick", "long"))
    chunks = [chunk for plan in plans for replica in (0, 1) for chunk in plan.chunks_of(replica)]
    rows = sorted((s.tenant, s.row) for chunk in chunks for s in chunk.sequences)
    assert len(plans) == 3
    assert rows == [("long", row) for row in range(3)] + [("quick", row) for row in range(4)]
    totals = {name: int(tokens.num_supervised_tokens.sum()) for name, tokens in files.items()}
    assert all(plan.supervised_tokens == totals for plan in plans)


@pytest.mark.slow
@pytest.mark.parametrize("batching", list(Batching))
def test_evaluation_changes_no_adapter_and_no_moment(batching: Batching, make_request) -> None:
    plain = train(make_request(None, None, batching))
    evaluated = train(make_request({"every": 1, "patience": 50}, {"every": 3, "publish": "last"}, batching))
    for kind in ("adapters", "optimiser"):
        assert files_of(evaluated, kind) == files_of(plain, kind)
    assert [path.split("-")[0] for path in files_of(evaluated, "best")] == ["quick"]


def when(is_it: Callable[[dict], bool], act: Callable[[], None]) -> Callable[[dict], None]:
    """An observer that acts once, at the first record that is the one."""
    acted = []

    def observe(record: dict) -> None:
        if not acted and is_it(record):
            acted.append(record)
            act()

    return observe


def interrupt() -> None:
    raise KeyboardInterrupt


def kill_a_rank() -> None:
    fleet = [p for p in psutil.Process().children(recursive=True) if "training.agent" in " ".join(p.cmdline())]
    agent = next(p for p in fleet if p.ppid() == os.getpid())
    next(p for p in fleet if p.ppid() == agent.pid).send_signal(signal.SIGKILL)


def assert_same_end(request: TrainingRequest, result: TrainingResult, unbroken) -> None:
    assert result.tenants == unbroken[1].tenants
    assert evaluations_of(request) == evaluations_of(unbroken[0])
    for kind in ("adapters", "best", "optimiser"):
        assert files_of(result, kind) == files_of(unbroken[1], kind)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 7])
def test_a_run_interrupted_between_a_step_and_its_evaluation_evaluates_first_when_it_resumes(
    step: int, stopped, make_request
) -> None:
    request = make_request(HOPELESS, {"every": 3}, Batching.PACKED)
    with pytest.raises(KeyboardInterrupt):
        train(request, when(lambda record: record["event"] == "step" and record["step"] == step, interrupt))
    assert [number for number, _ in evaluations_of(request) if number > step] == []
    assert_same_end(request, train(request), stopped)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 6])
def test_a_crash_between_an_evaluation_and_its_checkpoint_replays_to_the_same_decisions(
    step: int, stopped, make_request
) -> None:
    request = make_request(HOPELESS, {"every": 3}, Batching.PACKED)
    result = train(
        request, when(lambda record: record["event"] == "evaluation" and record["step"] == step, kill_a_rank)
    )
    assert "restart" in [record["event"] for record in read_journal(request.files.steps)]
    assert_same_end(request, result, stopped)


@pytest.mark.slow
def test_a_run_stopped_in_the_middle_of_an_evaluation_saves_the_step_before_it_at_once(
    stopped, make_request, monkeypatch
) -> None:
    request = make_request(HOPELESS, {"every": 3}, Batching.PACKED)
    evaluate, calls = Fleet.evaluate, []

    def interrupted(fleet: Fleet, plan) -> list[dict]:
        calls.append(plan.step)
        if len(calls) == 2:
            fleet._send({"kind": "evaluate", "plan": plan.to_json()})
            raise KeyboardInterrupt
        return evaluate(fleet, plan)

    with monkeypatch.context() as patch:
        patch.setattr(Fleet, "evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(request)
    saved = CheckpointStore(request.files.checkpoints, 2).latest()
    assert saved.step == 2
    assert saved.state["tenants"]["quick"]["evaluations"]["last_step"] == 1
    assert_same_end(request, train(request), stopped)


@pytest.mark.slow
def test_a_tenant_of_a_later_phase_is_evaluated_in_its_own_phase_and_the_first_is_saved_before(make_request) -> None:
    request, checkpoints = make_request({"every": 4}, {"every": 4}), []
    wide_only = replace(PLAN, groups=(ReplicaGroup(WIDE, 1),))
    phases = (Phase(("quick",), PLAN), Phase(("long",), wide_only))
    planner = request.planner.model_copy(update={"strategy": "task_sequential"})
    result = train(replace(request, phases=phases, planner=planner), checkpointed=checkpoints.append)
    assert [(step, list(tenants)) for step, tenants in evaluations_of(request)] == [
        (4, ["quick"]),
        (8, ["quick"]),
        (12, ["long"]),
        (16, ["long"]),
    ]
    assert {t.status for t in result.tenants.values()} == {TenantStatus.FINISHED}
    assert 8 in [c.step for c in checkpoints]
    assert len(files_of(result, "best")) == 2  # the first tenant's survived the new layout
