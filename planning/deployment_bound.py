"""A lower bound of the expected makespan of any deployment plan, whatever its buckets.

What is bounded: E[seconds of a joint step], over full batches drawn from the tenants' histograms, of every plan of at
most N GPUs over these candidates and every padded dispatch: any buckets, dynamic ones, one per length, or chunks that
mix lengths. Why it holds:

* A chunk padded to s >= l holds at most floor(M_i / s) <= floor(M_i / l) sequences, so each sequence of l tokens in it
  costs at least `c_i(l) = a_i / floor(M_i / l) + b_i l + c_i l^2` seconds per stage.
* A replica that is not idle spends at least the bubble of one shortest sequence, (pp_i - 1) (a_i + b_i l + c_i l^2).
  With beta_i = the smaller of that and a bound of every single batch's makespan, T_batch - beta_i is never negative,
  so the work that p_i replicas do in a batch is at most p_i (T_batch - beta_i), idle ones included.
* Both sides are linear in the batch, so they hold for expected counts and E[T] (Jensen is not needed).
* Lengths are grouped only to keep the integer program small. With work f(l) > 0 per sequence and
  `rho_ig = min over l in g of c_i(l) / f(l)`, serving work F of group g on i costs at least rho_ig F. A relaxation,
  whatever f is; f(l) = the fewest GPU seconds makes it tight.
* Independently, E[T] is at least the expected time of a batch's longest sequence alone. Drawing without replacement
  makes the longest one no shorter, so this holds for the training sampler too.

Not charged: padding, bubbles of more than one sequence, and the grain of whole chunks. They are part of the gap.
"""

import numpy as np

from planning.bucketing import choose_uppers
from planning.config import Batching
from planning.deployment_milp import best_throughputs
from planning.shares import CostTable, cost_table
from planning.types import Candidate
from planning.workload import Workload

NUM_GROUPS = 48
NUM_PROGRAMS = 2


def makespan_bound(
    workload: Workload, candidates: tuple[Candidate, ...], num_gpus: int, batching: Batching = Batching.PADDED
) -> float:
    """Seconds; see the module's text. Every length must fit on some candidate of at most `num_gpus` GPUs.

    With the throughput v(T) of the integer program, T * min(1, 1 / v(T)) is a bound for any T (`planning.shares`).
    """
    lengths, counts = workload.expected_counts()
    table = cost_table(candidates, lengths, batching)
    beta = np.minimum(
        table.depth * (table.fixed + table.variable[:, 0]), _shortest_batch(workload, candidates, num_gpus, batching)
    )
    relative_cost, work = _grouped(table, lengths, counts, candidates)
    bound = _longest_alone(workload, table, lengths)
    step_seconds = float(beta.max() + (table.num_gpus[:, None] * relative_cost).min(axis=0) @ work / num_gpus)
    for _ in range(NUM_PROGRAMS):
        share = relative_cost / (step_seconds - beta)[:, None]
        throughput = best_throughputs(share, work, table.num_gpus, num_gpus).upper_bound
        bound = max(bound, step_seconds * min(1.0, 1.0 / throughput))
        step_seconds = max(step_seconds / throughput, 2 * float(beta.max()))
    return bound


def _shortest_batch(workload: Workload, candidates: tuple[Candidate, ...], num_gpus: int, batching: Batching) -> float:
    """Seconds below which no batch of this workload ends: every sequence is its tenant's shortest, all GPUs busy."""
    table = cost_table(candidates, np.array([tenant.lengths[0] for tenant in workload.tenants]), batching)
    gpu_seconds = (table.num_gpus[:, None] * table.least_seconds).min(axis=0)
    return float(gpu_seconds @ np.array([tenant.batch_size for tenant in workload.tenants])) / num_gpus


def _grouped(
    table: CostTable, lengths: np.ndarray, counts: np.ndarray, candidates: tuple[Candidate, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """`rho_ig` and the expected work of each group; the lengths of a group fit on the same candidates."""
    room = np.array([candidate.max_chunk_tokens for candidate in candidates])
    last_that_fit = np.searchsorted(lengths, room, side="right") - 1
    ends = lengths[last_that_fit[last_that_fit >= 0]]
    uppers = np.union1d(choose_uppers(lengths, counts, NUM_GROUPS), ends)
    start = np.searchsorted(lengths, uppers[:-1], side="right")
    first = np.concatenate([[0], start])
    work_per_sequence = (table.num_gpus[:, None] * table.least_seconds).min(axis=0)
    relative_cost = np.minimum.reduceat(table.least_seconds / work_per_sequence, first, axis=1)
    return relative_cost, np.add.reduceat(counts * work_per_sequence, first)


def _longest_alone(workload: Workload, table: CostTable, lengths: np.ndarray) -> float:
    """Expected seconds of a batch's longest sequence, alone on the candidate that is fastest for it."""
    at_most = np.ones(len(lengths))
    for tenant in workload.tenants:
        below = np.concatenate([[0.0], np.cumsum(tenant.counts) / tenant.counts.sum()])
        at_most *= below[np.searchsorted(tenant.lengths, lengths, side="right")] ** tenant.batch_size
    # a shorter sequence never takes longer on a given candidate, and more candidates hold it
    return float(table.alone_seconds.min(axis=0) @ np.diff(at_most, prepend=0.0))
