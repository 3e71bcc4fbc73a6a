"""A run survives the death of whatever drives it: the command, the flow process of a worker, a cancellation.

The unbroken run is the oracle; nothing of a fleet may outlive its controller.
"""

import json
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from training.journal import effective_steps, read_journal

LOBRA = str(Path(sys.executable).with_name("lobra"))
STOP_SECONDS = 20.0  # a cancelled run has ended by then, with its last step saved


@pytest.fixture
def longer_run(run_content: dict, workspace: Path) -> dict:
    """Enough steps to be interrupted in the middle of, written to run.yaml."""
    for tenant in run_content["tenants"]:
        tenant["steps"] = 40
    run_content["training"]["save_every"] = 5
    run_content["tracking"]["register_adapters"] = False
    (workspace / "run.yaml").write_text(yaml.safe_dump(run_content))
    return run_content


def start(workspace: Path, name: str) -> subprocess.Popen:
    command = [LOBRA, "run", "run.yaml", "--run-dir", f"runs/{name}"]
    return subprocess.Popen(command, cwd=workspace, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_step(folder: Path, step: int, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while len(effective_steps(read_journal(folder / "steps.jsonl"))) < step:
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.05)


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def fleet_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        try:
            if "training.agent" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def adapters(folder: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in folder.glob("adapters/*/adapter_model.safetensors")}


@pytest.fixture
def unbroken(longer_run: dict, workspace: Path) -> dict[str, bytes]:
    assert start(workspace, "unbroken").wait(180) == 0
    found = adapters(workspace / "runs" / "unbroken")
    assert len(found) == 2
    return found


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 17])
def test_a_killed_command_leaves_no_process_and_resumes_to_the_same_adapters(
    step: int, unbroken: dict[str, bytes], workspace: Path
) -> None:
    run = start(workspace, "killed")
    folder = workspace / "runs" / "killed"
    wait_for_step(folder, step)
    processes = family(run.pid)  # Prefect's temporary server too
    assert len(fleet_of(processes)) == 4
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert not alive
    assert not (folder / "summary.json").exists()
    assert start(workspace, "killed").wait(180) == 0
    assert adapters(folder) == unbroken


@pytest.mark.slow
def test_a_terminated_command_saves_its_last_step_and_ends_in_time(unbroken: dict[str, bytes], workspace: Path) -> None:
    run = start(workspace, "stopped")
    folder = workspace / "runs" / "stopped"
    wait_for_step(folder, 7)
    fleet = fleet_of(family(run.pid))
    asked = time.monotonic()
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == -signal.SIGTERM  # Prefect cleans up, then lets the signal through
    assert time.monotonic() - asked < STOP_SECONDS
    _, alive = psutil.wait_procs(fleet, timeout=1)
    assert not alive
    done = effective_steps(read_journal(folder / "steps.jsonl"))[-1]["step"] + 1
    newest = max(folder.glob("checkpoints/step-*"))
    assert json.loads((newest / "controller.json").read_text())["step"] == done
    assert start(workspace, "stopped").wait(180) == 0
    assert adapters(folder) == unbroken


class RandomKills:
    """Runs the command and kills a rank, the agent or the command itself after random times, until `num_left` is 0.

    The command restarts its fleet by itself; where it ends, it is run again.
    """

    def __init__(self, workspace: Path, num_kills: int) -> None:
        self.workspace = workspace
        self.num_left = num_kills
        self.victims: dict[str, int] = {"rank": 0, "agent": 0, "command": 0}
        self.rng = random.Random(1)

    def finish(self, name: str) -> None:
        """The run `name`, killed until it is done or nobody is to be killed any more."""
        folder = self.workspace / "runs" / name
        codes: list[int] = []
        while not (folder / "summary.json").exists():
            run = start(self.workspace, name)
            while self.num_left and run.poll() is None:
                self._kill_one(run)
            if not self.num_left:
                codes.append(run.wait(600))
                assert codes in ([0], [1], [1, 0]), "the last kill may have ended a launch, and with it the command"

    def _kill_one(self, run: subprocess.Popen) -> None:
        with suppress(subprocess.TimeoutExpired):
            run.wait(self.rng.uniform(0.5, 12.0))
        if run.poll() is not None:
            return
        victim = self.rng.choice(sorted(self.victims))
        processes = family(run.pid)
        if victim == "command":
            run.kill()
            run.wait()
            _, alive = psutil.wait_procs(processes, timeout=20)
            assert not alive
        else:
            fleet = fleet_of(processes)
            agents = [process for process in fleet if process.ppid() == run.pid]
            chosen = agents if victim == "agent" else [process for process in fleet if process not in agents]
            if not chosen:
                return
            self.rng.choice(chosen).kill()
            _, alive = psutil.wait_procs(fleet, timeout=20)
            assert not alive
        self.victims[victim] += 1
        self.num_left -= 1


def trace(folder: Path) -> list[dict]:
    """What every step trained, and with which losses."""
    steps = effective_steps(read_journal(folder / "steps.jsonl"))
    keys = ("loss", "num_sequences", "num_tokens", "grad_norm")
    return [{name: [own[key] for key in keys] for name, own in step["tenants"].items()} for step in steps]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_thirty_kills_at_random_points_change_no_adapter(longer_run: dict, workspace: Path) -> None:
    for tenant in longer_run["tenants"]:
        tenant["steps"] = 1000
    longer_run["training"] |= {"save_every": 20, "max_restarts": 100}
    (workspace / "run.yaml").write_text(yaml.safe_dump(longer_run))
    assert start(workspace, "unbroken").wait(600) == 0
    shared_memory = sorted(Path("/dev/shm").iterdir())
    kills = RandomKills(workspace, num_kills=30)
    names = []
    while kills.num_left:
        names.append(f"killed-{len(names)}")
        kills.finish(names[-1])
    print(f"\n{kills.victims} killed in {len(names)} runs of 1,000 steps")
    for name in names:
        assert adapters(workspace / "runs" / name) == adapters(workspace / "runs" / "unbroken")
        assert trace(workspace / "runs" / name) == trace(workspace / "runs" / "unbroken")
    assert not fleet_of(psutil.Process().children(recursive=True))
    assert sorted(Path("/dev/shm").iterdir()) == shared_memory


def submit(api: httpx.Client, run: dict) -> str:
    deployment = api.get("/deployments/name/finetune/finetune").raise_for_status().json()
    body = {"parameters": {"run": run}, "state": {"type": "SCHEDULED"}}
    return str(api.post(f"/deployments/{deployment['id']}/create_flow_run", json=body).raise_for_status().json()["id"])


def wait_for_state(api: httpx.Client, flow_run_id: str, wanted: set[str], seconds: float) -> float:
    """Seconds until the flow run is in one of the states."""
    started = time.monotonic()
    while True:
        state = api.get(f"/flow_runs/{flow_run_id}").json()["state"]["type"]
        if state in wanted:
            return time.monotonic() - started
        assert time.monotonic() - started < seconds, f"flow run is {state}, not in {wanted}"
        time.sleep(0.25)


@pytest.mark.slow
def test_a_cancelled_flow_run_ends_in_time_and_its_retry_resumes(
    unbroken: dict[str, bytes], worker_api: httpx.Client, longer_run: dict, workspace: Path
) -> None:
    flow_run_id = submit(worker_api, longer_run)
    folder = workspace / "runs" / flow_run_id
    wait_for_step(folder, 6)
    worker_api.post(f"/flow_runs/{flow_run_id}/set_state", json={"state": {"type": "CANCELLING"}}).raise_for_status()
    seconds = wait_for_state(worker_api, flow_run_id, {"CANCELLED"}, 60)
    print(f"cancelled after {seconds:.1f} s")
    assert seconds < STOP_SECONDS + 15  # a worker looks for cancellations every 10 s or so
    assert not fleet_of(psutil.Process().children(recursive=True))
    done = effective_steps(read_journal(folder / "steps.jsonl"))[-1]["step"] + 1
    assert json.loads((max(folder.glob("checkpoints/step-*")) / "controller.json").read_text())["step"] == done
    retry = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True}
    worker_api.post(f"/flow_runs/{flow_run_id}/set_state", json=retry).raise_for_status()
    wait_for_state(worker_api, flow_run_id, {"COMPLETED"}, 180)
    assert adapters(folder) == unbroken


@pytest.mark.slow
def test_a_killed_flow_process_shows_as_crashed_and_its_retry_resumes(
    unbroken: dict[str, bytes], worker_api: httpx.Client, longer_run: dict, workspace: Path
) -> None:
    flow_run_id = submit(worker_api, longer_run)
    folder = workspace / "runs" / flow_run_id
    wait_for_step(folder, 6)
    fleet = fleet_of(psutil.Process().children(recursive=True))
    agent = next(process for process in fleet if process.parent() not in fleet)
    agent.parent().kill()
    wait_for_state(worker_api, flow_run_id, {"CRASHED"}, 60)
    time.sleep(12)  # the worker reports the crash a second time, which would undo a retry asked for before
    _, alive = psutil.wait_procs(fleet, timeout=15)
    assert not alive
    retry = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True}
    worker_api.post(f"/flow_runs/{flow_run_id}/set_state", json=retry).raise_for_status()
    wait_for_state(worker_api, flow_run_id, {"COMPLETED"}, 180)
    assert adapters(folder) == unbroken
