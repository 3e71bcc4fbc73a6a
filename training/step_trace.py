"""Traces of single steps, for whoever looks for lost time: `training.trace_steps` in a run file.

Every rank records those steps with PyTorch's profiler and writes a Chrome trace (open it in Perfetto) beside its log.
On a GPU the kernels are in it, phases are NVTX ranges, and Nsight Systems records just these steps when started with
`--capture-range=cudaProfilerApi --capture-range-end=repeat`. Recording slows a step down; the others cost nothing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class StepTracer:
    """Records the steps numbered `steps` of one rank."""

    def __init__(self, steps: tuple[int, ...], folder: Path, rank: int, device: str) -> None:
        self._steps = frozenset(steps)
        self._folder = folder
        self._rank = rank
        self._on_gpu = device != "cpu"

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a whole step."""
        if number not in self._steps:
            yield
            return
        if self._on_gpu:
            torch.cuda.cudart().cudaProfilerStart()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        with profile(activities=activities) as recorded:
            yield
            if self._on_gpu:
                torch.cuda.synchronize()
        if self._on_gpu:
            torch.cuda.cudart().cudaProfilerStop()
        path = trace_path(self._folder, number, self._rank)
        partial = path.with_name(f".{path.name}")  # of the same ending, which says that it is compressed
        recorded.export_chrome_trace(str(partial))
        os.replace(partial, path)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around a part of a step: a named range in what is recorded."""
        with record_function(name), torch.cuda.nvtx.range(name) if self._on_gpu else nullcontext():
            yield


def trace_path(folder: Path, step: int, rank: int) -> Path:
    return folder / f"trace-step-{step}-rank-{rank}.json.gz"
