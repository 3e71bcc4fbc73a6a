"""What a step, a checkpoint and a launch cost beside the work. Four ranks share two cores here.

pytest tests/benchmarks/training/test_overheads.py -m "" -s
"""

import statistics
import time
from collections.abc import Callable

import psutil
import pytest

from planning.types import ParallelConfig
from training.controller import train
from training.journal import effective_steps, read_journal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ONE, WIDE = ParallelConfig(1, 1), ParallelConfig(2, 1)
FOUR_RANKS = ((WIDE, 1), (ONE, 2))
NUM_RUNS = 7


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def test_sync_and_optimiser_are_a_small_part_of_a_step(
    make_joint: Callable, running: Callable, equal_tenants: Callable, is_quiet: bool
) -> None:
    with running(make_joint("sync", equal_tenants(4, 48, 192, 16), FOUR_RANKS), 1) as fleet:
        fleet.timed_step()
        steps = [fleet.timed_step() for _ in range(11)]
    # The rank that comes last waits for nobody: its seconds are what all would take after a barrier.
    shares = [min(report["sync_seconds"] for report in reports) / seconds for seconds, reports in steps]
    seconds = [seconds for seconds, _ in steps]
    print(f"\n(2,1)+(1,1)+(1,1): sync and optimiser {spread(shares, '.1%')} of a step of {spread(seconds, '.2f')} s")
    assert statistics.median(seconds) >= 0.5
    assert not is_quiet or statistics.median(shares) <= 0.10


def test_a_checkpoint_after_every_step_costs_little(
    make_joint: Callable, equal_tenants: Callable, interleaved: Callable, is_quiet: bool
) -> None:
    joint = make_joint("saved", equal_tenants(4, 128, 128, 16), ((ONE, 2),))
    spans: dict[int, list[float]] = {1: [], 1000: []}

    def run(save_every: int) -> None:
        request = joint.request(f"{save_every}-{len(spans[save_every])}", 8, save_every=save_every)
        train(request)
        times = [record["time"] for record in read_journal(request.files.steps) if record["event"] == "step"]
        spans[save_every].append((times[-1] - times[0]) / (len(times) - 1))

    interleaved({"every step": lambda: run(1), "never": lambda: run(1000)}, NUM_RUNS)
    costs = [every / never - 1 for every, never in zip(spans[1][1:], spans[1000][1:], strict=True)]
    print(f"\na checkpoint after every step of {spread(spans[1000][1:], '.2f')} s costs {spread(costs, '.1%')}")
    assert statistics.median(spans[1000]) >= 1.0
    assert not is_quiet or statistics.median(costs) <= 0.05


class KilledOnce:
    """Watches a training: kills its youngest rank after step 5, and times the first step and the first one after."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.first_step_seconds: float | None = None
        self.killed: float | None = None
        self.next_step_seconds: float | None = None

    def __call__(self, record: dict) -> None:
        if record["event"] != "step":
            return
        now = time.perf_counter()
        if self.first_step_seconds is None:
            self.first_step_seconds = now - self.begun
        if self.killed is not None and self.next_step_seconds is None:
            self.next_step_seconds = now - self.killed
        if record["step"] == 5 and self.killed is None:
            children = psutil.Process().children(recursive=True)
            ranks = [process for process in children if "training.agent" in " ".join(process.cmdline())]
            max(ranks, key=lambda process: process.create_time()).kill()
            self.killed = time.perf_counter()


def test_cold_start_and_restart_of_four_ranks(make_joint: Callable, equal_tenants: Callable, is_quiet: bool) -> None:
    joint = make_joint("start", equal_tenants(4, 16, 64, 8), FOUR_RANKS)
    starts, restarts, waits = [], [], []
    for number in range(NUM_RUNS):
        request, watch = joint.request(str(number), 12, save_every=2, max_restarts=1), KilledOnce()
        train(request, watch)
        steps = effective_steps(read_journal(request.files.steps))
        assert len(steps) == 12
        starts.append(watch.first_step_seconds)
        restarts.append(watch.next_step_seconds)
        waits.append(sum(step["plan_wait_seconds"] for step in steps) / sum(step["measured_seconds"] for step in steps))
    print(
        f"\nfour ranks: cold start to the first step {spread(starts, '.1f')} s; killed rank to the next step "
        f"{spread(restarts, '.1f')} s; waiting for plans {spread(waits, '.2%')} of step time"
    )
    assert not is_quiet or (statistics.median(starts) <= 15 and statistics.median(restarts) <= 8)
    assert not is_quiet or statistics.median(waits) <= 0.01
