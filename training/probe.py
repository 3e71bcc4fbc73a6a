"""The command `profile`: one rank takes part in one timed step over chunks of random tokens.

All replicas start together after a barrier and compute equally many equal chunks, so that all ranks are busy for as
long. A step is forward and backward, gradient sync and update, as in training: what the controller waits beyond the
busy seconds is the step's overhead.
"""

import bisect
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch._C._profiler import _EventType, _ProfilerEvent
from torch.profiler import ProfilerActivity, profile

from data_prep.collate import CollatedChunk, TenantSpan
from planning.config import Batching, PositiveInt, Section

if TYPE_CHECKING:
    from training.worker import Worker


class Probe(Section):
    """`num_chunks` equal chunks of `num_sequences` sequences of `length` tokens, padded or packed.

    Sequences of all chunks belong to `owners` in turn, beginning anew when they are through.
    """

    num_sequences: PositiveInt
    length: PositiveInt
    batching: Batching
    num_chunks: PositiveInt
    owners: tuple[str, ...]
    measures_memory: bool = False

    @property
    def num_tokens(self) -> int:
        """Computed tokens of one chunk."""
        return self.num_sequences * self.length


def run_probe(worker: "Worker", probe: Probe) -> dict[str, float]:
    """Carry out one probe; collective over the world. The report: replica, busy seconds, and, if asked, peak bytes.

    Peak bytes are those above what the rank held before: activations, gradients and temporaries.
    """
    tenants = sorted(worker.optimisers)
    vocab_size = worker.stage.base.vocab_size
    chunks = [random_chunk(probe, number, vocab_size) for number in range(probe.num_chunks)]
    is_cuda = worker.stage.device != "cpu"

    def compute() -> None:
        worker.model.forward_backward(chunks)
        if is_cuda:
            torch.cuda.synchronize()

    dist.barrier()
    start = time.perf_counter()
    peak = 0
    if probe.measures_memory:
        peak = _cuda_peak_bytes(compute) if is_cuda else _cpu_peak_bytes(compute)
    else:
        compute()
    busy_seconds = time.perf_counter() - start
    worker.sync(tenants)
    worker.optimiser.step({name: optimiser.config.learning_rate for name, optimiser in worker.optimisers.items()})
    return {
        "replica": worker.stage.position.replica.index,
        "busy_seconds": busy_seconds,
        "peak_bytes": peak,
    }


def random_chunk(probe: Probe, number: int, vocab_size: int) -> CollatedChunk:
    """The `number`-th chunk of a probe: random tokens, every position supervised."""
    generator = np.random.default_rng((number, probe.num_sequences, probe.length))
    first = number * probe.num_sequences
    owners = sorted(probe.owners[(first + index) % len(probe.owners)] for index in range(probe.num_sequences))
    is_packed = probe.batching is Batching.PACKED
    shape = (1, probe.num_tokens) if is_packed else (probe.num_sequences, probe.length)
    unit = probe.length if is_packed else 1
    return CollatedChunk(
        tokens_BT=generator.integers(0, vocab_size, shape),
        labels_BT=generator.integers(0, vocab_size, shape),
        weights_BT=np.full(shape, 1.0 / probe.num_tokens, np.float32),
        spans=tuple(
            TenantSpan(tenant, owners.index(tenant) * unit, owners.count(tenant) * unit)
            for tenant in sorted(set(owners))
        ),
        segments=(probe.length,) * probe.num_sequences if is_packed else None,
    )


def _cuda_peak_bytes(compute: Callable[[], None]) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    compute()
    return torch.cuda.max_memory_allocated() - before


def _cpu_peak_bytes(compute: Callable[[], None]) -> int:
    """The CPU allocator keeps no peak, and the resident set shows the heap's fragments rather than the tensors.

    So the profiler's records of every allocation and release are followed in their order.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        compute()
    events = _allocations(profiled.profiler.kineto_results.experimental_event_tree())
    fields = [event.extra_fields for event in sorted(events, key=lambda event: event.start_time_ns)]
    return peak_bytes([(entry.ptr, entry.alloc_size) for entry in fields])


def _allocations(events: Iterable[_ProfilerEvent]) -> Iterator[_ProfilerEvent]:
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event
        yield from _allocations(event.children)


def peak_bytes(records: Iterable[tuple[int, int]]) -> int:
    """Most bytes held at a time, from (address, bytes) of allocations and, with negative bytes, releases in order.

    What gloo's threads release is not recorded; it ends where its memory is given out again.
    """
    addresses: list[int] = []  # sorted
    sizes: dict[int, int] = {}
    held = peak = 0
    for address, size in records:
        if size > 0:
            first = bisect.bisect_left(addresses, address)
            if first and addresses[first - 1] + sizes[addresses[first - 1]] > address:
                first -= 1
            last = bisect.bisect_left(addresses, address + size)
            held += size - sum(sizes.pop(ended) for ended in addresses[first:last])
            addresses[first:last] = [address]
            sizes[address] = size
            peak = max(peak, held)
        elif address in sizes:
            held -= sizes.pop(address)
            del addresses[bisect.bisect_left(addresses, address)]
    return peak
