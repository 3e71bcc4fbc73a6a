"""Benchmarks print what they measure; times are void, and only printed, when the machine was busy before they began."""

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import pytest
import torch
import torch.distributed as dist

QUIET_LOAD = 0.5
PAIRS = 7


@dataclass(frozen=True)
class Timing:
    """Median, fastest and slowest wall milliseconds of the calls, and median CPU milliseconds, children included."""

    median_ms: float
    fastest_ms: float
    slowest_ms: float
    cpu_ms: float

    def __str__(self) -> str:
        return f"{self.median_ms:.2f} ms ({self.fastest_ms:.2f}-{self.slowest_ms:.2f}), CPU {self.cpu_ms:.2f} ms"

    @classmethod
    def of(cls, samples: list[tuple[float, float]]) -> "Timing":
        """Of (wall, CPU) seconds."""
        wall, cpu = ([1e3 * value for value in column] for column in zip(*samples, strict=True))
        return cls(statistics.median(wall), min(wall), max(wall), statistics.median(cpu))


def _own_cpu_seconds() -> float:
    """Of this process and its children that ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _living_children_cpu_seconds() -> float:
    alive = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(times.user + times.system for times in alive)


def measure(call: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one call, children included; looking at them is not counted."""
    children, own, start = _living_children_cpu_seconds(), _own_cpu_seconds(), time.perf_counter()
    call()
    wall, own = time.perf_counter() - start, _own_cpu_seconds() - own
    return wall, own + _living_children_cpu_seconds() - children


@pytest.fixture(scope="session")
def is_quiet() -> bool:
    """Whether the load was at most 0.5 before the first benchmark."""
    load = os.getloadavg()[0]
    print(f"\nload before the start: {load:.2f}" + ("" if load <= QUIET_LOAD else " - TIMES ARE VOID"))
    return load <= QUIET_LOAD


@pytest.fixture(scope="session")
def timed() -> Callable[[list[Callable[[], object]]], Timing]:
    """`timed(calls)`: each call once, after the first as a warm-up."""

    def run(calls: list[Callable[[], object]]) -> Timing:
        calls[0]()
        return Timing.of([measure(call) for call in calls])

    return run


@pytest.fixture(scope="session")
def interleaved() -> Callable[..., dict[str, Timing]]:
    """`interleaved({name: call}, pairs)`: all calls in turn, `pairs` times, in reversed order every second time.

    Each is called once before, as a warm-up.
    """

    def run(calls: dict[str, Callable[[], object]], pairs: int = PAIRS) -> dict[str, Timing]:
        for call in calls.values():
            call()
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for number in range(pairs):
            for name in list(calls) if number % 2 == 0 else reversed(list(calls)):
                samples[name].append(measure(calls[name]))
        return {name: Timing.of(taken) for name, taken in samples.items()}

    return run


@pytest.fixture
def one_rank_world() -> Iterator[None]:
    """This process is the only rank of a gloo world, on one thread."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, is_master=True), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
