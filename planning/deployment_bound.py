"""A lower bound of any deployment plan's mean step over the sampled batches, in their buckets or packed.

With share w_i(l) of a sequence at a step of T seconds (`planning.shares`), the load r_b(T) of batch b on a plan is the
least largest sum of shares of a replica, and r(T) that of the mean batch. Why T with r(T) = 1 bounds the mean step:

* T_b >= T r_b(T) where r_b <= 1, and r_b is convex in the counts, so without pipelines mean(T_b) >= T r(T) (Jensen).
* A batch heavier than T needs T_b >= T (1 + kappa (r_b - 1)), kappa = 1 - the largest bubble / T, because a longer step
  spreads its bubble over more chunks. So (1 - kappa) mean(max(r_b - 1, 0)) is subtracted, at the winner's prices.
* A sequence that takes longer than T alone counts alone / T, which holds for every batch that has it.
* Lengths are grouped only to keep the integer program small. With work f(l) > 0 per sequence and
  `rho_ig = min over l in g of w_i(l) / f(l)`, serving work F of group g on i costs at least rho_ig F. A relaxation,
  whatever f is; f(l) = the fewest GPU seconds makes it tight.
* Independently, no batch is shorter than its longest sequence alone.

Not charged: the grain of whole sequences and chunks. It is part of the gap, with what the search missed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planning.config import Batching
from planning.deployment_milp import best_throughputs
from planning.plan_ranking import SampledBatch
from planning.shares import CostTable, cost_table, fractional_step, shares
from planning.split_lp import SplitSolver, prices
from planning.types import Candidate

NUM_GROUPS = 48
MAX_PROGRAMS = 4
CONVERGED = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """Lengths as computed (ascending), sequences of each per batch (B, U), and the cost of each."""

    lengths: np.ndarray
    counts: np.ndarray
    table: CostTable

    @property
    def demand(self) -> np.ndarray:
        return np.asarray(self.counts.mean(axis=0))


def makespan_bound(
    batches: Sequence[SampledBatch], candidates: tuple[Candidate, ...], num_gpus: int, winner: np.ndarray
) -> float:
    """Seconds; see the module's text. Every length must fit on some candidate of at most `num_gpus` GPUs.

    `winner` are the plan's replicas per candidate (I), whose prices say how much the batches' spread may take away.
    """
    columns = _columns(batches, candidates)
    bound = _longest_alone(columns)
    groups = _group_starts(columns, np.array([candidate.max_chunk_tokens for candidate in candidates]))
    step_seconds = fractional_step(columns.table, columns.demand, num_gpus)
    for _ in range(MAX_PROGRAMS):
        share = _expected_shares(columns.table, step_seconds)
        relative, work = _grouped(columns, share, groups)
        load = 1.0 / best_throughputs(relative, work, columns.table.num_gpus, num_gpus).upper_bound
        spread = _spread_loss(columns, share, winner, step_seconds)
        bound = max(bound, step_seconds * min(1.0, load) * (1.0 - spread))
        if abs(load - 1.0) < CONVERGED:
            break
        step_seconds *= load
    return bound


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
    return _Columns(lengths, counts, cost_table(candidates, lengths, batching))


def _expected_shares(table: CostTable, step_seconds: float) -> np.ndarray:
    """Shares of which a batch may hold a fraction of a sequence; infinite only where a sequence does not fit."""
    share, _ = shares(table, step_seconds)
    return np.asarray(np.minimum(share, np.where(share < np.inf, np.inf, table.alone_seconds / step_seconds)))


def _group_starts(columns: _Columns, room_I: np.ndarray) -> np.ndarray:
    """First columns of the groups: about equal work in each, and the lengths of a group fit on the same candidates."""
    work = np.cumsum(columns.demand * (columns.table.num_gpus[:, None] * columns.table.least_seconds).min(axis=0))
    quantiles = np.searchsorted(work, work[-1] * np.arange(1, NUM_GROUPS) / NUM_GROUPS)
    first_too_long = np.searchsorted(columns.lengths, room_I, side="right")
    starts = np.unique(np.concatenate([[0], quantiles, first_too_long]))
    return np.asarray(starts[starts < len(columns.lengths)])


def _grouped(columns: _Columns, share: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`rho_ig`, and the mean batch's work of each group."""
    work = (columns.table.num_gpus[:, None] * columns.table.least_seconds).min(axis=0)
    return np.minimum.reduceat(share / work, starts, axis=1), np.add.reduceat(columns.demand * work, starts)


def _spread_loss(columns: _Columns, share: np.ndarray, winner: np.ndarray, step_seconds: float) -> float:
    """(1 - kappa) times the mean excess of a batch's load over 1, at the winner's prices."""
    table, present = columns.table, (winner > 0)[:, None]
    if not (table.depth * winner).any():
        return 0.0
    split = SplitSolver().solve(share[None], winner, columns.demand)
    price = prices(split.value, share[None], winner)
    loads = columns.counts @ price / float(columns.demand @ price)
    longest = step_seconds * float(loads.max())
    full = table.fixed[:, None] + table.variable * np.floor(table.capacity)
    # the chunk of the least share (`planning.shares`), rounded up by one sequence
    best = np.sqrt(table.fixed * longest / np.maximum(table.depth, 1))[:, None] + table.variable
    bubble = np.where(present & (table.alone_seconds <= longest), table.depth[:, None] * np.minimum(full, best), 0.0)
    return min(1.0, float(bubble.max()) / step_seconds) * float(np.maximum(loads - 1.0, 0.0).mean())


def _longest_alone(columns: _Columns) -> float:
    """Mean seconds of a batch's longest sequence, alone on the candidate that is fastest for it."""
    last = columns.counts.shape[1] - 1 - np.argmax(columns.counts[:, ::-1] > 0, axis=1)
    return float(columns.table.alone_seconds.min(axis=0)[last].mean())
