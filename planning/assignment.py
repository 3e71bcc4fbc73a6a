"""From fractions to whole sequences: quotas per group, then chunks to the replica that finishes first.

A `Load` is the integer state of one step. Replica r computes `num_sequences[r, j]` sequences of bucket j in
`ceil(n / chunk[r, j])` chunks of nearly equal size, and by Eq. 12 takes

    sum_j (A_rj n_rj + a_r chunks_rj) + (pp_r - 1) * its largest chunk
"""

import heapq
from dataclasses import dataclass

import numpy as np

from planning.shares import CostTable


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Sequences per replica and bucket, with the cost of each replica.

    Shapes: `fixed`, `depth` (R); `variable`, `capacity`, `chunk`, `num_sequences` (R, J). `capacity` is the most
    sequences that one chunk can take, `chunk` the most that it takes, 0 where the bucket does not fit. The search
    changes `chunk` and `num_sequences` in place.
    """

    fixed: np.ndarray
    depth: np.ndarray
    variable: np.ndarray
    capacity: np.ndarray
    chunk: np.ndarray
    num_sequences: np.ndarray

    def stage_seconds(self, replica: np.ndarray, bucket: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Seconds of `count` sequences of a bucket on one stage of a replica; the arguments broadcast."""
        num_chunks = -(-count // np.maximum(self.chunk[replica, bucket], 1))
        return np.asarray(self.variable[replica, bucket] * count + self.fixed[replica] * num_chunks)

    def largest_chunk_seconds(self, replica: np.ndarray, bucket: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Seconds of the largest of those chunks; 0 for no sequences."""
        num_chunks = -(-count // np.maximum(self.chunk[replica, bucket], 1))
        size = -(-count // np.maximum(num_chunks, 1))
        return np.where(count > 0, self.fixed[replica] + self.variable[replica, bucket] * size, 0.0)

    def stage_and_largest(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of each replica (R) without the bubble, and of its largest chunk per bucket (R, J)."""
        num_replicas, num_buckets = self.num_sequences.shape
        replica, bucket = np.arange(num_replicas)[:, None], np.arange(num_buckets)
        stage = self.stage_seconds(replica, bucket, self.num_sequences).sum(axis=1)
        return stage, self.largest_chunk_seconds(replica, bucket, self.num_sequences)

    def replica_seconds(self) -> np.ndarray:
        """Seconds of each replica's step."""
        stage, largest = self.stage_and_largest()
        return np.asarray(stage + self.depth * largest.max(axis=1))


def whole_quotas(part_IJ: np.ndarray, counts_J: np.ndarray) -> np.ndarray:
    """Sequences per group and bucket; columns add up to `counts_J`. Largest remainders win, then the first group."""
    exact = part_IJ * counts_J
    quotas = np.floor(exact + 1e-6).astype(np.int64)
    missing = counts_J - quotas.sum(axis=0)
    order = np.argsort(-(exact - quotas), axis=0, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(len(order))[:, None], axis=0)
    return np.asarray(quotas + (rank < missing))


def first_load(table: CostTable, chunk_IJ: np.ndarray, quotas_IJ: np.ndarray, group_R: np.ndarray) -> Load:
    """Whole chunks, longest bucket first, to the replica of the group that finishes first."""
    num_sequences = np.zeros((len(group_R), quotas_IJ.shape[1]), dtype=np.int64)
    for group in range(len(quotas_IJ)):
        heap = [(0.0, int(replica)) for replica in np.flatnonzero(group_R == group)]
        fixed, variable = float(table.fixed[group]), table.variable[group].tolist()
        for bucket in reversed(np.flatnonzero(quotas_IJ[group]).tolist()):
            left, chunk = int(quotas_IJ[group, bucket]), int(chunk_IJ[group, bucket])
            while left:
                size = min(left, chunk)
                seconds, replica = heap[0]
                heapq.heapreplace(heap, (seconds + fixed + variable[bucket] * size, replica))
                num_sequences[replica, bucket] += size
                left -= size
    return Load(
        fixed=table.fixed[group_R],
        depth=table.depth[group_R],
        variable=table.variable[group_R],
        capacity=table.capacity[group_R],
        chunk=np.where(table.capacity > 0, chunk_IJ, 0)[group_R],
        num_sequences=num_sequences,
    )
