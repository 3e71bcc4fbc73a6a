"""Joint training through the real fleet: agent, ranks, store, checkpoints. The unbroken run is the oracle."""

import _thread
import dataclasses
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from planning.config import Batching, ClusterConfig, PlannerConfig
from planning.errors import InputError
from planning.strategies import Phase
from planning.types import Candidate, DeploymentPlan, ParallelConfig, ReplicaGroup
from training import controller
from training.checkpoint import CheckpointStore
from training.config import AdapterConfig, BaseModelConfig, TenantConfig, TrainingConfig
from training.controller import BudgetSpentError, TenantFailedError, train
from training.fleet import FleetError
from training.journal import effective_steps, overhead_gpu_seconds, read_journal
from training.progress import TenantStatus
from training.request import TrainingFiles, TrainingRequest, TrainingResult
from training.schedule import learning_rate

SMALL, WIDE = ParallelConfig(1, 1), ParallelConfig(2, 1)
CANDIDATES = (Candidate(SMALL, 64, 1e-3, 1e-5, 0.0), Candidate(WIDE, 160, 1e-3, 7e-6, 0.0))
PLAN = DeploymentPlan(
    groups=(ReplicaGroup(WIDE, 1), ReplicaGroup(SMALL, 1)),
    num_gpus=4,  # one is left out, and costs
    predicted_step_seconds=0.01,
    lower_bound_seconds=0.01,
    solve_seconds=0.0,
    tenant_gpu_seconds={},
    pruned=(),
    alternatives=(),
)
NUM_STEPS = 8


def tenant(name: str, seed: int, steps: int, **optimiser: object) -> TenantConfig:
    return TenantConfig(
        name=name,
        dataset={"path": "unused", "prompt_column": "p", "response_column": "r"},
        adapter={"rank": 4, "alpha": 8, "target_modules": ["q_proj", "o_proj", "up_proj"]},
        optimiser={"learning_rate": 2e-3, **optimiser},
        batch_size=5,
        steps=steps,
        seed=seed,
    )


def diverging_tenant() -> TenantConfig:
    """After one update the product of its gate and up projections overflows: inf - inf in the down projection."""
    bad = tenant("bad", 2, NUM_STEPS, learning_rate=10)
    return bad.model_copy(
        update={"adapter": AdapterConfig(rank=4, alpha=1e19, target_modules=("gate_proj", "up_proj"))}
    )


@pytest.fixture(scope="module")
def make_request(base_model_folder: Callable[[str], Path], token_path: Callable[..., Path], tmp_path_factory):
    """`make_request(name, tenants)`: a training in its own folder, on one wide and one small replica."""

    def build(name: str, *tenants: TenantConfig, **training: object) -> TrainingRequest:
        root = tmp_path_factory.mktemp(name)
        tenants = tenants or (
            tenant("short/words", 1, NUM_STEPS, schedule="cosine", warmup_steps=2),
            tenant("long texts", 2, NUM_STEPS - 3, schedule="linear"),
        )
        lengths = {0: [12, 20, 33, 9, 25, 40, 17], 1: [60, 100, 130, 75, 150, 90]}
        return TrainingRequest(
            files=TrainingFiles(
                root / "checkpoints", root / "steps.jsonl", root / "plans.jsonl", root / "logs", root / "control.json"
            ),
            base_model=BaseModelConfig(path=base_model_folder("llama")),
            tenants=tenants,
            token_paths={t.name: token_path(root, f"tenant{i}", lengths[i], seed=i) for i, t in enumerate(tenants)},
            phases=(Phase(tuple(t.name for t in tenants), PLAN),),
            candidates=CANDIDATES,
            cluster=ClusterConfig(num_gpus=4),
            planner=PlannerConfig(num_buckets=4),
            training=TrainingConfig(**{"save_every": 3, **training}),
        )

    return build


@pytest.fixture(scope="module")
def unbroken(make_request) -> tuple[TrainingRequest, TrainingResult]:
    request = make_request("unbroken")
    return request, train(request)


def adapters(result: TrainingResult) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((result.checkpoint.folder / "adapters").iterdir())}


def fleet_processes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "training.agent" in " ".join(p.cmdline())]


def assert_no_process_left(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def at_step(step: int, act: Callable[[], None]) -> Callable[[dict], None]:
    """An observer that acts once, when a step's record arrives for the first time."""
    acted = []

    def observe(record: dict) -> None:
        if record["event"] == "step" and record["step"] == step and not acted:
            acted.append(step)
            act()

    return observe


def test_every_gpu_second_is_charged_to_tenants_or_to_overhead(make_request) -> None:
    request = make_request("accounts")
    started = time.perf_counter()
    result = train(request)
    bill = (time.perf_counter() - started) * request.cluster.num_gpus
    records = read_journal(request.files.steps)
    steps = effective_steps(records)
    assert [step["step"] for step in steps] == list(range(NUM_STEPS))
    for step in steps:
        assert sum(t["gpu_seconds"] for t in step["tenants"].values()) == pytest.approx(step["gpu_seconds"], rel=1e-9)
        assert step["measured_seconds"] * request.cluster.num_gpus == pytest.approx(step["gpu_seconds"])
    charged = sum(step["gpu_seconds"] for step in steps) + overhead_gpu_seconds(records)
    assert charged == pytest.approx(bill, rel=0.02)
    assert {name: t.status for name, t in result.tenants.items()} == dict.fromkeys(
        result.tenants, TenantStatus.FINISHED
    )


def test_a_finished_tenant_leaves_the_batch_and_the_others_go_on(unbroken) -> None:
    request, _ = unbroken
    steps = effective_steps(read_journal(request.files.steps))
    assert [sorted(step["tenants"]) for step in steps] == [["long texts", "short/words"]] * 5 + [["short/words"]] * 3
    losses = [step["tenants"]["short/words"]["loss"] for step in steps]
    assert losses[-1] < losses[0]


def test_every_steps_learning_rate_is_in_the_journal(unbroken) -> None:
    request, _ = unbroken
    steps = effective_steps(read_journal(request.files.steps))
    for t in request.tenants:
        rates = [step["tenants"][t.name]["learning_rate"] for step in steps if t.name in step["tenants"]]
        assert rates == [learning_rate(t.optimiser, step, t.steps) for step in range(t.steps)]


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_an_interrupted_run_keeps_its_last_step_and_resumes_to_the_same_adapters_bit_for_bit(
    step: int, unbroken, make_request
) -> None:
    whole_request, whole = unbroken
    request = make_request("stopped")
    with pytest.raises(KeyboardInterrupt):
        train(request, at_step(step, interrupt))
    assert_no_process_left(fleet_processes())
    assert CheckpointStore(request.files.checkpoints, 2).latest().step == step + 1
    assert adapters(train(request)) == adapters(whole)
    plans = [[(r["step"], r["plan"]) for r in read_journal(x.files.plans)] for x in (request, whole_request)]
    assert plans[0] == plans[1]


def test_a_step_that_hangs_is_abandoned_and_the_one_before_is_checkpointed(unbroken, make_request, monkeypatch) -> None:
    monkeypatch.setattr(controller, "ABANDON_SECONDS", 1.0)
    request = make_request("hung")
    stopped_at = []

    def hang() -> None:
        last_rank = max(fleet_processes(), key=lambda p: p.pid)  # forked last: the small replica
        last_rank.suspend()
        stopped_at.append(time.monotonic())
        threading.Timer(1.0, _thread.interrupt_main).start()

    with pytest.raises(KeyboardInterrupt):
        train(request, at_step(1, hang))
    assert time.monotonic() - stopped_at[0] < 15
    assert_no_process_left(fleet_processes())
    assert CheckpointStore(request.files.checkpoints, 2).latest().step == 2
    assert adapters(train(request)) == adapters(unbroken[1])


def kill(victim: str) -> None:
    agent = next(p for p in fleet_processes() if p.ppid() == os.getpid())
    target = agent if victim == "agent" else next(p for p in fleet_processes() if p.ppid() == agent.pid)
    target.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("victim", ["rank", pytest.param("agent", marks=pytest.mark.slow)])
def test_a_killed_process_restarts_the_fleet_and_changes_no_adapter(victim: str, unbroken, make_request) -> None:
    request = make_request("restarted")
    processes: list[psutil.Process] = []

    def act() -> None:
        processes.extend(fleet_processes())
        kill(victim)

    result = train(request, at_step(4, act))
    assert len(processes) == 4
    assert_no_process_left(processes)
    assert adapters(result) == adapters(unbroken[1])
    restarts = [record for record in read_journal(request.files.steps) if record["event"] == "restart"]
    assert len(restarts) == 1
    assert ("was killed by SIGKILL" if victim == "rank" else "agent ended") in restarts[0]["reason"]


@pytest.mark.slow
def test_a_killed_rank_ends_a_run_that_may_not_restart_and_a_rerun_resumes(unbroken, make_request) -> None:
    request = make_request("killed", max_restarts=0)
    with pytest.raises(FleetError, match=r"rank \d was killed by SIGKILL"):
        train(request, at_step(4, lambda: kill("rank")))
    assert_no_process_left(fleet_processes())
    assert adapters(train(request)) == adapters(unbroken[1])


def test_a_tenant_is_taken_out_by_the_control_file_and_the_others_go_on(make_request) -> None:
    request = make_request("cancelled")
    ask = lambda: request.files.control.write_text('{"cancel": ["long texts"]}')  # noqa: E731
    result = train(request, at_step(1, ask))
    assert result.tenants["long texts"].status is TenantStatus.CANCELLED
    assert result.tenants["short/words"].status is TenantStatus.FINISHED
    steps = effective_steps(read_journal(request.files.steps))
    assert [len(step["tenants"]) for step in steps] == [2] * 2 + [1] * (NUM_STEPS - 2)


def test_a_spent_budget_stops_the_run_with_a_checkpoint(make_request) -> None:
    request = make_request("budget", max_gpu_seconds=1e-3)
    with pytest.raises(BudgetSpentError, match=r"max_gpu_seconds 0\.001 is spent after step 1"):
        train(request)
    assert CheckpointStore(request.files.checkpoints, 2).latest().step == 1


@pytest.mark.parametrize("batching", [pytest.param(Batching.PADDED, marks=pytest.mark.slow), Batching.PACKED])
def test_one_tenant_after_the_other_on_plans_of_their_own_gives_the_adapters_of_the_joint_run(
    batching: Batching, unbroken, make_request
) -> None:
    joint, result = unbroken
    other = dataclasses.replace(PLAN, groups=(ReplicaGroup(WIDE, 1),))
    phases = (Phase(("short/words",), PLAN), Phase(("long texts",), other))
    planner = PlannerConfig(strategy="task_sequential", batching=batching, num_buckets=4)
    request = dataclasses.replace(make_request("sequential"), phases=phases, planner=planner)
    sequential = train(request)
    records = read_journal(request.files.steps)
    assert [r["event"] for r in records if r["event"] in ("launch", "stop")] == ["launch", "stop"] * 2
    assert len(effective_steps(records)) == sum(t.steps for t in joint.tenants)
    assert_same_adapters(sequential, result)


def assert_same_adapters(got: TrainingResult, want: TrainingResult) -> None:
    """Within the numerics contract: 2e-2 x learning rate."""
    for wanted in (want.checkpoint.folder / "adapters").iterdir():
        tensors = load_file(got.checkpoint.folder / "adapters" / wanted.name)
        assert max(abs(tensors[key] - value).max() for key, value in load_file(wanted).items()) <= 2e-2 * 2e-3


def test_a_diverging_tenant_is_quarantined_and_the_other_trains_as_if_alone(make_request) -> None:
    good, bad = tenant("good", 1, NUM_STEPS), diverging_tenant()
    alone = train(make_request("alone", good))
    both = train(make_request("both", good, bad, on_tenant_error="skip", max_nonfinite_steps=2))
    assert both.tenants["bad"].status is TenantStatus.QUARANTINED
    assert "2 non-finite updates in a row" in both.tenants["bad"].reason
    assert both.tenants["good"].status is TenantStatus.FINISHED
    files = [next((r.checkpoint.folder / "adapters").glob("good-*")) for r in (alone, both)]
    want, got = map(load_file, files)
    assert max(abs(got[name] - want[name]).max() for name in want) <= 2e-2 * 2e-3


def test_a_diverging_tenant_ends_the_run_when_tenants_may_not_fail(make_request) -> None:
    request = make_request("fail", diverging_tenant(), max_nonfinite_steps=2)
    with pytest.raises(TenantFailedError, match=r"tenant 'bad': 2 non-finite updates in a row.*on_tenant_error: skip"):
        train(request)


def test_the_checkpoint_of_another_run_is_refused(unbroken, make_request) -> None:
    other = make_request("other", tenant("short/words", 3, NUM_STEPS), tenant("long texts", 2, NUM_STEPS - 3))
    shutil.copytree(unbroken[0].files.checkpoints, other.files.checkpoints)
    with pytest.raises(InputError, match=r"step-00000008 is the checkpoint of another run.*move it away"):
        train(other)


def test_a_base_weight_that_is_not_finite_is_bad_input_named_by_its_tensor(make_request, tmp_path: Path) -> None:
    request = make_request("nan")
    folder = Path(shutil.copytree(request.base_model.path, tmp_path / "nan"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][90, 3] = np.nan  # on the second tensor-parallel rank's side
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        InputError, match=r"model\.safetensors: tensor model\.layers\.2\.mlp\.up_proj\.weight has a value"
    ):
        train(dataclasses.replace(request, base_model=BaseModelConfig(path=folder)))
    assert_no_process_left(fleet_processes())


def test_a_checkpoint_of_one_layout_continues_on_another(unbroken, make_request) -> None:
    request = make_request("moved")
    with pytest.raises(KeyboardInterrupt):
        train(request, at_step(4, interrupt))
    elsewhere = dataclasses.replace(PLAN, groups=(ReplicaGroup(WIDE, 1),))
    phase = dataclasses.replace(request.phases[0], plan=elsewhere)
    assert_same_adapters(train(dataclasses.replace(request, phases=(phase,))), unbroken[1])
