"""Joint training against the usual loops: `pytest tests/benchmarks/training/test_speed.py -m "" -s`.

Equality of the adapters is asserted always, times on a quiet machine only.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from data_prep.collate import collate
from data_prep.names import folder_name
from data_prep.sampler import step_rows
from data_prep.token_file import TokenFile
from planning.types import ActivationPolicy, Chunk, ParallelConfig, Replica, SequenceRef
from training.adapter_difference import adapter_difference
from training.adapters import Adapter, initial_tensor
from training.base_model import read_base_model
from training.config import BaseModelConfig, TenantConfig
from training.layout import FleetLayout, Stage
from training.megatron_model import ReplicaModel, create_replica_groups

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
REPOSITORY = Path(__file__).resolve().parents[3]
ONE = ParallelConfig(1, 1)
LOOPS = ("padded", "grouped", "alone")


class PeftProcesses:
    """The baseline: processes that train their tenants one after another, all at the same time, on two cores."""

    def __init__(self, joint, num_processes: int, num_steps: int, stack: ExitStack) -> None:
        self.folder = joint.folder / f"peft-{num_processes}"
        self.folder.mkdir()
        num_threads = 2 // num_processes
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": str(num_threads)}
        self.processes = []
        for number, tenants in enumerate(_shares(joint, num_processes, num_steps)):
            path = self.folder / f"{number}.json"
            path.write_text(json.dumps({"model": str(joint.model), "tenants": tenants}))
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("peft_loop.py")), str(path), str(num_threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
            stack.callback(process.kill)
            self.processes.append(process)
        self._wait()

    def train(self, loop: str) -> None:
        self._send(f"train {loop}")

    def adapters(self, tenants: tuple[TenantConfig, ...]) -> dict[str, dict[str, np.ndarray]]:
        self._send(f"save {self.folder}")
        return {t.name: load_file(self.folder / f"{folder_name(t.name)}.safetensors") for t in tenants}

    def _send(self, line: str) -> None:
        for process in self.processes:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        self._wait()

    def _wait(self) -> None:
        for process in self.processes:
            assert process.stdout.readline(), "a baseline process died"


def _shares(joint, num_processes: int, num_steps: int) -> list[dict]:
    """The tenants of each process, by most tokens first to the process with the fewest."""
    work, content = {}, {}
    for t in joint.tenants:
        tokens = TokenFile(joint.token_paths[t.name])
        steps = [step_rows(t.seed, step, tokens.num_rows, t.batch_size).tolist() for step in range(num_steps)]
        work[t.name] = sum(int(tokens.num_tokens[rows].sum()) for rows in steps)
        content[t.name] = {"config": t.model_dump(mode="json"), "steps": steps}
        content[t.name]["tokens"] = str(joint.token_paths[t.name])
    shares: list[dict] = [{} for _ in range(num_processes)]
    for name in sorted(work, key=work.__getitem__, reverse=True):
        least = min(shares, key=lambda share: sum(work[other] for other in share))
        least[name] = content[name]
    return shares


def test_joint_training_against_peft_loops(
    make_joint: Callable, running: Callable, six_tenants: list, interleaved: Callable, is_quiet: bool
) -> None:
    num_steps = 3
    joint = make_joint("six", six_tenants, ((ONE, 2),))
    base = read_base_model(BaseModelConfig(path=joint.model))
    with ExitStack() as stack:
        fleet = stack.enter_context(running(joint, num_steps))
        layouts = {count: PeftProcesses(joint, count, num_steps, stack) for count in (1, 2)}
        fleet.train()
        for processes, loop in zip(layouts.values(), ("alone", "grouped"), strict=True):
            processes.train(loop)
        alone, grouped = (processes.adapters(joint.tenants) for processes in layouts.values())
        ours = fleet.adapters()
        noise = max(adapter_difference(base, t, alone[t.name], grouped[t.name]).relative for t in joint.tenants)
        error = max(adapter_difference(base, t, alone[t.name], ours[t.name]).relative for t in joint.tenants)
        print(f"\nupdates after {num_steps} steps: joint against peft {error:.1e}, peft against itself {noise:.1e}")
        # AdamW's first steps are the signs of gradients, so rounding shows; tests/training keeps the strict tolerance
        assert error <= 2 * noise
        num_tokens = sum(sum(fleet.plan(step).supervised_tokens.values()) for step in range(num_steps))
        calls: dict[str, Callable[[], object]] = {"joint": fleet.train}
        for count, processes in layouts.items():
            for loop in LOOPS:
                name = f"peft {loop}, {count} x {2 // count}"
                calls[name] = lambda processes=processes, loop=loop: processes.train(loop)
        timings = interleaved(calls)
    speeds = {name: num_tokens / timing.median_ms * 1e3 for name, timing in timings.items()}
    print(f"{len(joint.tenants)} tenants, {num_steps} steps, {num_tokens} supervised tokens; tokens/s:")
    for name, speed in speeds.items():
        print(f"  {name:20} {speed:7.0f}   {timings[name]}")
    padded = max(speed for name, speed in speeds.items() if "padded" in name)
    best = max(speed for name, speed in speeds.items() if "grouped" in name or "alone" in name)
    print(
        f"joint / best loop with little padding {speeds['joint'] / best:.2f}, / padded {speeds['joint'] / padded:.2f}"
    )
    assert not is_quiet or speeds["joint"] >= best


@pytest.mark.usefixtures("one_rank_world")
@pytest.mark.parametrize("size_and_rank", [(1024, 16), (1024, 64), (256, 16)])
def test_adapter_overhead_against_the_frozen_base(
    make_joint: Callable,
    equal_tenants: Callable,
    interleaved: Callable,
    is_quiet: bool,
    size_and_rank: tuple[int, int],
) -> None:
    hidden_size, rank = size_and_rank
    num_tenants, length = 4, 512
    joint = make_joint("four", equal_tenants(num_tenants, num_tenants, length, rank), ((ONE, 1),), hidden_size, 2)
    base = read_base_model(BaseModelConfig(path=joint.model))
    stage = Stage(base, FleetLayout((Replica(0, ONE, 0),), base.num_layers), 0, "cpu", ActivationPolicy())
    adapters = {
        t.name: Adapter(t.name, t.adapter, stage, lambda key, t=t: initial_tensor(base, t, key)) for t in joint.tenants
    }
    groups = create_replica_groups(stage.layout, 0, "gloo")
    with_adapters, alone = (ReplicaModel(stage, groups, each, "float32") for each in (adapters, {}))
    # Without adapters nothing asks for a gradient; the embedding's output does here, so backward passes every layer.
    alone.model.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())
    files = {name: TokenFile(path) for name, path in joint.token_paths.items()}
    chunk = collate(
        Chunk(tuple(SequenceRef(name, 0, length) for name in files), None), files, dict.fromkeys(files, 1e-3)
    )
    timings = interleaved(
        {
            "joint": lambda: with_adapters.forward_backward([chunk]),
            "base": lambda: alone.forward_backward([chunk]),
        }
    )
    overhead = timings["joint"].cpu_ms / timings["base"].cpu_ms - 1
    print(
        f"\nh={hidden_size}, r={rank}, {num_tenants} tenants, 7 targets, T={num_tenants * length}: adapters cost "
        f"{overhead:.1%} CPU; with {timings['joint']}, base {timings['base']}"
    )
    assert not is_quiet or size_and_rank != (1024, 16) or overhead <= 0.25


def test_64_tenants_against_4_with_the_same_tokens(
    make_joint: Callable, running: Callable, equal_tenants: Callable, interleaved: Callable, is_quiet: bool
) -> None:
    with ExitStack() as stack:
        calls = {}
        for count in (4, 64):
            joint = make_joint(f"of{count}", equal_tenants(count, 128, 96, 4), ((ONE, 2),))
            calls[str(count)] = stack.enter_context(running(joint, 1)).train
        timings = interleaved(calls, pairs=11)
    ratio = timings["64"].median_ms / timings["4"].median_ms
    print(f"\n64 tenants {timings['64']}; 4 tenants {timings['4']}; ratio {ratio:.2f}")
    assert not is_quiet or ratio <= 1.3
