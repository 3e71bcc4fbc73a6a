"""Benchmarks print what they measure; times are void, and only printed, when the machine was busy before they began."""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

QUIET_LOAD = 0.5


@dataclass(frozen=True)
class Timing:
    """Median, fastest and slowest wall milliseconds of the calls, and median CPU milliseconds of this process."""

    median_ms: float
    fastest_ms: float
    slowest_ms: float
    cpu_ms: float

    def __str__(self) -> str:
        return f"{self.median_ms:.2f} ms ({self.fastest_ms:.2f}-{self.slowest_ms:.2f}), CPU {self.cpu_ms:.2f} ms"


@pytest.fixture(scope="session")
def is_quiet() -> bool:
    """Whether the load was at most 0.5 before the first benchmark."""
    load = os.getloadavg()[0]
    print(f"\nload before the start: {load:.2f}" + ("" if load <= QUIET_LOAD else " - TIMES ARE VOID"))
    return load <= QUIET_LOAD


@pytest.fixture
def timed() -> Callable[[list[Callable[[], object]]], Timing]:
    """`timed(calls)`: each call once, after the first as a warm-up."""

    def run(calls: list[Callable[[], object]]) -> Timing:
        calls[0]()
        wall, cpu = [], []
        for call in calls:
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            call()
            wall.append(1e3 * (time.perf_counter() - wall_start))
            cpu.append(1e3 * (time.process_time() - cpu_start))
        return Timing(statistics.median(wall), min(wall), max(wall), statistics.median(cpu))

    return run
