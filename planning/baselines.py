"""Dispatch rules that the paper compares with (section 5.3), padded only: not part of any strategy that trains.

length_based  every bucket to the group that computes it on the fewest GPU seconds, however loaded that group is
uniform       data parallelism as usual: as drawn, every replica the same number of sequences; equal replicas only
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np

from planning.assignment import Load, first_load, whole_quotas
from planning.bucketing import choose_uppers
from planning.shares import CostTable, cost_table
from planning.types import Candidate, ParallelConfig, Replica


class DispatchRule(StrEnum):
    """How a step's sequences reach the replicas; `balanced` is the product's own dispatcher."""

    BALANCED = "balanced"
    LENGTH_BASED = "length_based"
    UNIFORM = "uniform"


def assign_by_length(
    replicas: Sequence[Replica], candidates: Mapping[ParallelConfig, Candidate], uppers: np.ndarray, counts: np.ndarray
) -> Load:
    """Length-based dispatch of `counts` sequences per bucket; whole chunks to the replica of a group least busy."""
    table, group_R = _table(replicas, candidates, uppers)
    gpu_seconds = table.num_gpus[:, None] * table.least_seconds
    part = np.asarray(gpu_seconds.argmin(axis=0) == np.arange(len(gpu_seconds))[:, None], dtype=float)
    return first_load(table, np.maximum(table.capacity, 1), whole_quotas(part, counts), group_R)


def assign_uniformly(
    replicas: Sequence[Replica], candidates: Mapping[ParallelConfig, Candidate], uppers: np.ndarray, drawn: np.ndarray
) -> Load:
    """Uniform dispatch: the k-th of the `drawn` lengths to replica k modulo their number, in full chunks per bucket."""
    table, group_R = _table(replicas, candidates, uppers)
    num_sequences = np.array(
        [
            np.bincount(np.searchsorted(uppers, drawn[first :: len(replicas)]), minlength=len(uppers))
            for first in range(len(replicas))
        ]
    )
    return Load(
        fixed=table.fixed[group_R],
        depth=table.depth[group_R],
        variable=table.variable[group_R],
        capacity=table.capacity[group_R],
        chunk=table.capacity[group_R],
        num_sequences=num_sequences,
    )


def power_of_two_uppers(longest_tokens: int, num_buckets: int, largest_chunk_tokens: int) -> tuple[int, ...]:
    """Fixed buckets as the published code has them: each half as long as the next; the last holds `longest_tokens`.

    Where the power of two is more than any replica holds, the last ends with the largest chunk instead.
    """
    last = 1 << (longest_tokens - 1).bit_length()
    shorter = (max(1, last >> (num_buckets - 1 - k)) for k in range(num_buckets - 1))
    return (*shorter, min(last, largest_chunk_tokens))


def fitted_uppers(lengths: np.ndarray, counts: np.ndarray, num_buckets: int) -> tuple[int, ...]:
    """Fixed buckets with the least padding for the expected lengths."""
    return tuple(choose_uppers(lengths, counts, num_buckets).tolist())


def _table(
    replicas: Sequence[Replica], candidates: Mapping[ParallelConfig, Candidate], uppers: np.ndarray
) -> tuple[CostTable, np.ndarray]:
    configs = sorted({replica.config for replica in replicas})
    group_R = np.array([configs.index(replica.config) for replica in replicas])
    return cost_table([candidates[config] for config in configs], uppers), group_R
