"""A proven lower bound of any deployment plan's mean step over the sampled batches, in their buckets or packed.

Let w_i(l, T) be the share of a step of T seconds that a sequence takes on configuration i (`planning.shares`), p any
plan of whole replicas on at most N GPUs that holds the longest sequence, T_b(p) its shortest step for batch b, and
z >= 0 prices with z p <= 1 for every such p. With r_b(T) = sum over l in b of min over i of z_i w_i(l, T),

    T_b(p) >= T min(1, r_b(T))    for every T.

For either T_b > T, or every replica finishes by T_b <= T, and its shares of T add up to at most T_b / T. Summed over
the replicas, each times its z_i, that is at least r_b(T) on the left and at most T_b / T on the right.

The largest of these bounds over a grid of T bounds a batch, and the mean over the batches bounds the mean step:
neither bubbles nor the batches' spread need another argument. Where prices for all plans say too little, the plans are
split into boxes (p_i <= k, p_i > k) with prices of their own, and the least of the boxes' bounds holds. Prices come
from a linear program at the mean batch, scaled by an exact knapsack (`deployment_prices`): poor ones make the bound
low, never wrong.

Lengths are grouped to save time. With work f(l) > 0 per sequence and `rho_ig = min over l in g of w_i(l) / f(l)`,
serving work F of group g on i takes at least rho_ig F, whatever f is; f(l) = the fewest GPU seconds makes it tight.

Not charged: the grain of whole sequences and chunks. It is part of the gap, with what the search missed.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planning.config import Batching
from planning.deployment_prices import Box, PriceProgram, largest_worth
from planning.plan_ranking import SampledBatch
from planning.shares import CostTable, cost_table, fractional_step, shares
from planning.types import Candidate

NUM_GROUPS = 96
NUM_STEPS = 32  # T of the grid
MAX_SPREAD = 4.0  # of the grid, up and down from the mean batch
MAX_PROGRAMS = 4
CONVERGED = 1e-3
MAX_BOXES = 100
UNSERVED = 1e30  # price of work that no configuration can take within T


@dataclass(frozen=True, slots=True)
class MakespanBound:
    """Seconds below which no plan's mean step can be, and those of its longest sequence, which no GPU shortens."""

    seconds: float
    longest_alone_seconds: float


def makespan_bound(batches: Sequence[SampledBatch], candidates: tuple[Candidate, ...], num_gpus: int) -> MakespanBound:
    """See the module's text. Every length must fit on some candidate of at most `num_gpus` GPUs."""
    columns = _columns(batches, candidates)
    alone_B = _longest_alone(columns)
    return MakespanBound(_least_mean_seconds(_task(columns, num_gpus), alone_B), float(alone_B.mean()))


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """Lengths as computed (ascending), sequences of each per batch (B, U), the cost of each, and tokens per chunk."""

    lengths: np.ndarray
    counts: np.ndarray
    table: CostTable
    room: np.ndarray

    @property
    def work(self) -> np.ndarray:
        """f(l) of the module's text: the fewest GPU seconds of one sequence of each length (U)."""
        return np.asarray((self.table.num_gpus[:, None] * self.table.least_seconds).min(axis=0))

    def relative(self, share: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """`rho_ig` of the groups that start with these columns."""
        return np.asarray(np.minimum.reduceat(share / self.work, starts, axis=1))


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """What is bounded: T of the grid (K), `rho` (K, I, G), each batch's work (B, G), and where prices come from."""

    num_gpus: np.ndarray
    max_gpus: int
    is_home: np.ndarray
    steps: np.ndarray
    relative: np.ndarray
    work: np.ndarray
    program: PriceProgram

    def batch_bounds(self, worth: np.ndarray, usable: np.ndarray) -> np.ndarray:
        """`max over T of T min(1, r_b(T))` (B), by prices under which no plan of `usable` replicas is worth over 1."""
        relative = self.relative[:, usable]
        serves = relative < UNSERVED
        price = np.where(serves, worth[usable, None] * np.where(serves, relative, 0.0), UNSERVED).min(axis=1)
        load = price @ self.work.T
        return np.asarray((self.steps[:, None] * np.minimum(1.0, load)).max(axis=0))


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A box of plans, its batches' bounds (B), and the fractional plan that its program likes best (I)."""

    box: Box
    seconds: np.ndarray
    replicas: np.ndarray


def _least_mean_seconds(task: _Task, alone_B: np.ndarray) -> float:
    """Splits the box with the least bound, again and again up to `MAX_BOXES`, and returns the least bound."""
    root = _node(task, Box(np.zeros_like(task.num_gpus), task.max_gpus // task.num_gpus), alone_B)
    queue = [(0.0, 0, root)] if root else []
    number = 0
    while number < MAX_BOXES and (halves := queue[0][2].box.split(queue[0][2].replicas, task.num_gpus)):
        known_B = heapq.heappop(queue)[2].seconds
        for half in halves:
            number += 1
            if (node := _node(task, half, known_B)) is not None:
                heapq.heappush(queue, (float(node.seconds.mean()), number, node))
    return float(queue[0][2].seconds.mean())


def _node(task: _Task, box: Box, known_B: np.ndarray) -> _Node | None:
    """The box's bounds, no lower than those of a larger box; None where the box holds no plan."""
    if largest_worth(np.zeros(len(task.num_gpus)), task.num_gpus, task.max_gpus, task.is_home, box) < 0:
        return None
    prices = task.program.solve(box)
    most = largest_worth(prices.worth, task.num_gpus, task.max_gpus, task.is_home, box)
    own_B = task.batch_bounds(prices.worth / most, box.most > 0) if most > 0 else known_B
    return _Node(box, np.maximum(known_B, own_B), prices.replicas)


def _task(columns: _Columns, max_gpus: int) -> _Task:
    table, starts = columns.table, _group_starts(columns)
    work_BG = np.add.reduceat(columns.counts * columns.work, starts, axis=1)
    program, step_seconds = _mean_program(columns, starts, work_BG.mean(axis=0), max_gpus)
    load_B = work_BG.sum(axis=1) / work_BG.sum(axis=1).mean()
    low, high = np.clip([0.95 * load_B.min(), 1.1 * load_B.max()], 1 / MAX_SPREAD, MAX_SPREAD)
    steps = step_seconds * np.geomspace(low, high, NUM_STEPS)
    relative = np.stack([columns.relative(shares(table, seconds)[0], starts) for seconds in steps])
    return _Task(table.num_gpus, max_gpus, table.capacity[:, -1] > 0, steps, relative, work_BG, program)


def _mean_program(
    columns: _Columns, starts: np.ndarray, work_G: np.ndarray, max_gpus: int
) -> tuple[PriceProgram, float]:
    """The price program of the mean batch, at the T that its best fractional plan takes, and that T."""
    table = columns.table
    everything = Box(np.zeros_like(table.num_gpus), max_gpus // table.num_gpus)
    step_seconds = fractional_step(table, columns.counts.mean(axis=0), max_gpus)
    for _ in range(MAX_PROGRAMS):
        # the mean batch has fractions of sequences, also of those that take longer than T alone
        share, _ = shares(table, step_seconds)
        share = np.minimum(share, np.where(share < np.inf, np.inf, table.alone_seconds / step_seconds))
        program = PriceProgram(columns.relative(share, starts) * work_G, table.num_gpus, max_gpus)
        throughput = program.solve(everything).throughput
        if abs(throughput - 1.0) < CONVERGED:
            break
        step_seconds /= throughput
    return program, step_seconds


def _columns(batches: Sequence[SampledBatch], candidates: tuple[Candidate, ...]) -> _Columns:
    per_batch = [
        np.unique(batch.lengths, return_counts=True)
        if batch.buckets is None
        else (batch.buckets.uppers, batch.buckets.counts)
        for batch in batches
    ]
    lengths = np.unique(np.concatenate([own for own, _ in per_batch]))
    counts = np.zeros((len(batches), len(lengths)))
    for row, (own, number) in zip(counts, per_batch, strict=True):
        row[np.searchsorted(lengths, own)] = number
    batching = Batching.PACKED if batches[0].buckets is None else Batching.PADDED
    room = np.array([candidate.max_chunk_tokens for candidate in candidates])
    return _Columns(lengths, counts, cost_table(candidates, lengths, batching), room)


def _group_starts(columns: _Columns) -> np.ndarray:
    """First columns of the groups: about equal work in each, and the lengths of a group fit on the same candidates."""
    work = np.cumsum(columns.counts.mean(axis=0) * columns.work)
    quantiles = np.searchsorted(work, work[-1] * np.arange(1, NUM_GROUPS) / NUM_GROUPS)
    first_too_long = np.searchsorted(columns.lengths, columns.room, side="right")
    starts = np.unique(np.concatenate([[0], quantiles, first_too_long]))
    return np.asarray(starts[starts < len(columns.lengths)])


def _longest_alone(columns: _Columns) -> np.ndarray:
    """Seconds of each batch's longest sequence, alone on the candidate that is fastest for it (B)."""
    last = columns.counts.shape[1] - 1 - np.argmax(columns.counts[:, ::-1] > 0, axis=1)
    return np.asarray(columns.table.alone_seconds.min(axis=0)[last])
