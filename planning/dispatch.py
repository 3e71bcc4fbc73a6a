"""Per step: which sequences go to which replica, in which chunks (paper, section 4.2 and appendix D).

1. buckets with the least padding for this step's lengths (`bucketing`);
2. a linear program splits the buckets over the replica groups and bounds the makespan (`shares`, `split_lp`);
3. whole chunks to the replica that finishes first, within the program's quotas (`assignment`);
4. moves and swaps away from the slowest replica (`local_search`).

The result is integer per replica and depends only on the set of sequences, not on their order, on earlier steps or on
a clock. Padded batching; a chunk holds sequences of one bucket.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import numpy as np

from planning.assignment import Load, first_load, whole_quotas
from planning.bucketing import buckets_from, choose_uppers
from planning.cost import chunk_seconds, replica_seconds
from planning.errors import PlanInfeasibleError
from planning.local_search import improve
from planning.shares import cost_table
from planning.split_lp import SplitSolver
from planning.types import Candidate, Chunk, Dispatch, ParallelConfig, Replica, SequenceRef

GOOD_ENOUGH = 1e-4  # relative distance to the bound at which the local search stops

_by_length = attrgetter("num_tokens", "tenant", "row")
_by_row = attrgetter("tenant", "row")


@dataclass(frozen=True, slots=True, eq=False)
class BucketCounts:
    """`counts[j]` sequences, each padded to `uppers[j]` tokens; uppers ascend."""

    uppers: np.ndarray
    counts: np.ndarray


def bucket_counts(lengths: np.ndarray, num_buckets: int) -> BucketCounts:
    """The buckets with the least padding for these lengths, and how many fall into each."""
    unique, counts = np.unique(lengths, return_counts=True)
    uppers = choose_uppers(unique, counts, num_buckets)
    bucket = np.searchsorted(uppers, unique)
    return BucketCounts(uppers, np.bincount(bucket, weights=counts).astype(np.int64))


class Dispatcher:
    """Dispatches step after step onto the same replicas; nothing of one step reaches the next."""

    def __init__(
        self,
        replicas: tuple[Replica, ...],
        candidates: Mapping[ParallelConfig, Candidate],
        num_buckets: int,
        max_search_moves: int,
    ) -> None:
        self._replicas = replicas
        self._candidate_of = [candidates[replica.config] for replica in replicas]
        configs = sorted({replica.config for replica in replicas})
        self._groups = [candidates[config] for config in configs]
        self._group_R = np.array([configs.index(replica.config) for replica in replicas])
        self._num_replicas_I = np.bincount(self._group_R)
        self._num_buckets = num_buckets
        self._max_search_moves = max_search_moves
        self._solver = SplitSolver()

    @property
    def num_gpus(self) -> np.ndarray:
        """GPUs of each replica (R)."""
        return np.array([replica.config.num_gpus for replica in self._replicas])

    def dispatch(self, sequences: Sequence[SequenceRef]) -> Dispatch:
        """All sequences, each in exactly one chunk; replicas in the order given. No sequences give empty replicas.

        Raises PlanInfeasibleError when a sequence is longer than every replica's largest chunk.
        """
        idle = tuple(() for _ in self._replicas)
        if not sequences:
            return Dispatch(idle, tuple(0.0 for _ in self._replicas), 0.0, ())
        ordered = sorted(sequences, key=_by_length)
        self._check_longest(ordered[-1])
        batch = bucket_counts(np.array([sequence.num_tokens for sequence in ordered]), self._num_buckets)
        load, bound = self.assign(batch)
        chunks = self._chunks(ordered, batch, load)
        seconds = tuple(replica_seconds(c, own) for c, own in zip(self._candidate_of, chunks, strict=True))
        return Dispatch(chunks, seconds, bound, buckets_from(batch.uppers))

    def assign(self, batch: BucketCounts) -> tuple[Load, float]:
        """Whole sequences per replica and bucket, and a lower bound of the makespan for these buckets (seconds)."""
        table = cost_table(self._groups, batch.uppers)
        shortest = self._solver.shortest_step(table, self._num_replicas_I, batch.counts)
        quotas_IJ = whole_quotas(shortest.split.part, batch.counts)
        load = first_load(table, shortest.chunk, quotas_IJ, self._group_R)
        improve(load, self._max_search_moves, shortest.lower_bound_seconds * (1 + GOOD_ENOUGH))
        return load, shortest.lower_bound_seconds

    def _check_longest(self, longest: SequenceRef) -> None:
        roomiest = max(self._groups, key=lambda candidate: candidate.max_chunk_tokens)
        if longest.num_tokens > roomiest.max_chunk_tokens:
            raise PlanInfeasibleError(
                f"tenant {longest.tenant}, row {longest.row} has {longest.num_tokens} tokens, but the roomiest replica "
                f"{roomiest.config} holds {roomiest.max_chunk_tokens}; plan again with this data, or set "
                f"tenants[].dataset.max_length <= {roomiest.max_chunk_tokens}"
            )

    def _chunks(self, ordered: list[SequenceRef], batch: BucketCounts, load: Load) -> tuple[tuple[Chunk, ...], ...]:
        """Deals the sequences (by length) to the replicas in order; each replica's chunks by falling seconds."""
        chunks: list[list[Chunk]] = [[] for _ in self._replicas]
        num_chunks_RJ = -(-load.num_sequences // np.maximum(load.chunk, 1))
        first = 0
        for bucket in range(len(batch.uppers)):
            padded_tokens = int(batch.uppers[bucket])
            for replica in np.flatnonzero(load.num_sequences[:, bucket]).tolist():
                count, num_chunks = int(load.num_sequences[replica, bucket]), int(num_chunks_RJ[replica, bucket])
                ends = [first + count * k // num_chunks for k in range(num_chunks + 1)]
                chunks[replica] += [
                    Chunk(tuple(sorted(ordered[start:end], key=_by_row)), padded_tokens)
                    for start, end in pairwise(ends)
                ]
                first += count
        return tuple(
            tuple(sorted(own, key=lambda chunk: (-chunk_seconds(candidate, chunk), _by_row(chunk.sequences[0]))))
            for candidate, own in zip(self._candidate_of, chunks, strict=True)
        )
