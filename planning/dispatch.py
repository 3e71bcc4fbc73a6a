"""Per step: which sequences go to which replica, in which chunks (paper, section 4.2 and appendix D).

Padded batching; a chunk holds sequences of one bucket:
1. buckets with the least padding for this step's lengths, or fixed ones (`bucketing`);
2. a linear program splits the buckets over the replica groups and bounds the makespan (`shares`, `split_lp`);
3. whole chunks to the replica that finishes first, within the program's quotas (`assignment`);
4. moves and swaps away from the slowest replica (`local_search`), chunk sizes of pipelines (`chunk_sizes`).

Packed batching; a chunk holds whole sequences up to its replica's token budget: the same program over classes of
neighbouring lengths, then `packing` and `packed_search`; at last `tenant_grouping` leaves fewer tenants per chunk.

The result is integer per replica and depends only on the set of sequences, not on their order, on earlier steps or on
a clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import numpy as np

from planning.assignment import Load, first_load, whole_quotas
from planning.bucketing import buckets_from, choose_uppers
from planning.config import Batching, PlannerConfig
from planning.cost import chunk_seconds, replica_seconds
from planning.errors import PlanInfeasibleError
from planning.local_search import kick, settle
from planning.packed_search import improve_packed
from planning.packing import Order, PackedLoad, PackingTask, pack
from planning.shares import cost_table, shares
from planning.split_lp import SplitSolver, bucket_costs, class_costs, class_ends
from planning.tenant_grouping import grouped_by_tenant
from planning.types import Candidate, Chunk, DeploymentPlan, Dispatch, ParallelConfig, Replica, SequenceRef

GOOD_ENOUGH = 1e-4  # relative distance to the bound at which the local search stops
PACKED_GOOD_ENOUGH = 0.004  # a search step on packed chunks costs more and gains less
SECOND_TRY = 0.012  # relative distance to the bound above which packing tries another order
MAX_KICKED_REPLICAS = 8  # of a step that is searched more thoroughly,
MAX_KICKED, NUM_KICKS_SMALL = 24, 15  # always with so few sequences,
MIN_KICKED, NUM_KICKS = 200, 20  # with so many, whose bound is close,
WORTH_KICKING = 0.018  # if the search ended this far (relative) above it
NUM_CLASSES = 24  # of packed sequences, in the linear program

_by_length = attrgetter("num_tokens", "tenant", "row")
_by_row = attrgetter("tenant", "row")


@dataclass(frozen=True, slots=True, eq=False)
class BucketCounts:
    """`counts[j]` sequences, each padded to `uppers[j]` tokens; uppers ascend."""

    uppers: np.ndarray
    counts: np.ndarray


def bucket_counts(lengths: np.ndarray, num_buckets: int, fixed_uppers: tuple[int, ...] = ()) -> BucketCounts:
    """The buckets with the least padding for these lengths, or the fixed ones in use, and how many fall into each."""
    unique, counts = np.unique(lengths, return_counts=True)
    uppers = np.array(fixed_uppers) if fixed_uppers else choose_uppers(unique, counts, num_buckets)
    bucket = np.searchsorted(uppers, unique)
    filled = np.bincount(bucket, weights=counts, minlength=len(uppers)).astype(np.int64)
    return BucketCounts(uppers[filled > 0], filled[filled > 0])


def dispatcher_for(
    plan: DeploymentPlan, candidates: Mapping[ParallelConfig, Candidate], planner: PlannerConfig
) -> "Dispatcher":
    """The dispatcher that a plan was made for: its replicas, its buckets, the planner's batching."""
    return Dispatcher(
        plan.replicas, candidates, planner.num_buckets, planner.max_search_moves, planner.batching, plan.bucket_uppers
    )


class Dispatcher:
    """Dispatches step after step onto the same replicas; nothing of one step reaches the next."""

    def __init__(
        self,
        replicas: tuple[Replica, ...],
        candidates: Mapping[ParallelConfig, Candidate],
        num_buckets: int,
        max_search_moves: int,
        batching: Batching = Batching.PADDED,
        fixed_uppers: tuple[int, ...] = (),
    ) -> None:
        self._replicas = replicas
        self._candidate_of = [candidates[replica.config] for replica in replicas]
        configs = sorted({replica.config for replica in replicas})
        self._groups = [candidates[config] for config in configs]
        self._group_R = np.array([configs.index(replica.config) for replica in replicas])
        self._num_replicas_I = np.bincount(self._group_R)
        self._room_I = np.array([candidate.max_chunk_tokens for candidate in self._groups])
        self._num_buckets = num_buckets
        self._max_search_moves = max_search_moves
        self._batching = batching
        self._fixed_uppers = fixed_uppers
        self._solver = SplitSolver()

    @property
    def num_gpus(self) -> np.ndarray:
        """GPUs of each replica (R)."""
        return np.array([replica.config.num_gpus for replica in self._replicas])

    def dispatch(self, sequences: Sequence[SequenceRef]) -> Dispatch:
        """All sequences, each in exactly one chunk; replicas in the order given. No sequences give empty replicas.

        Raises PlanInfeasibleError when a sequence is longer than every replica's largest chunk, or than the last of
        fixed buckets.
        """
        idle = tuple(() for _ in self._replicas)
        if not sequences:
            return Dispatch(idle, tuple(0.0 for _ in self._replicas), 0.0, ())
        ordered = sorted(sequences, key=_by_length)
        self._check_longest(ordered[-1])
        lengths = np.array([sequence.num_tokens for sequence in ordered])
        if self._batching is Batching.PACKED:
            packed, bound = self.pack(lengths)
            by_replica = _packed_chunks(ordered, packed, len(self._replicas))
            chunks: Sequence[Sequence[Chunk]] = [
                grouped_by_tenant(c, own) for c, own in zip(self._candidate_of, by_replica, strict=True)
            ]
            uppers = np.array([], dtype=np.int64)
        else:
            batch = self.buckets_of(lengths)
            load, bound = self.assign(batch)
            chunks, uppers = _padded_chunks(ordered, batch, load), batch.uppers
        chunks_by_seconds = tuple(
            tuple(sorted(own, key=lambda chunk: (-chunk_seconds(candidate, chunk), _by_row(chunk.sequences[0]))))
            for candidate, own in zip(self._candidate_of, chunks, strict=True)
        )
        seconds = tuple(replica_seconds(c, own) for c, own in zip(self._candidate_of, chunks_by_seconds, strict=True))
        return Dispatch(chunks_by_seconds, seconds, bound, buckets_from(uppers))

    def buckets_of(self, lengths: np.ndarray) -> BucketCounts:
        """The buckets that sequences of these lengths (tokens) get."""
        return bucket_counts(lengths, self._num_buckets, self._fixed_uppers)

    def assign(self, batch: BucketCounts) -> tuple[Load, float]:
        """Whole sequences per replica and bucket, and a lower bound of the makespan for these buckets (seconds)."""
        table = cost_table(self._groups, batch.uppers)
        shortest = self._solver.shortest_step(bucket_costs(table, batch.counts), self._num_replicas_I)
        quotas_IJ = whole_quotas(shortest.split.part, batch.counts)
        _, chunk_IJ = shares(table, shortest.step_seconds)
        load = first_load(table, chunk_IJ, quotas_IJ, self._group_R)
        good_enough_seconds = shortest.lower_bound_seconds * (1 + GOOD_ENOUGH)
        settle(load, self._max_search_moves, good_enough_seconds)
        if self._max_search_moves and len(self._replicas) <= MAX_KICKED_REPLICAS:
            num_sequences, bound = batch.counts.sum(), shortest.lower_bound_seconds
            if num_sequences <= MAX_KICKED:
                kick(load, NUM_KICKS_SMALL, self._max_search_moves, bound * (1 + GOOD_ENOUGH))
            elif num_sequences >= MIN_KICKED:
                kick(load, NUM_KICKS, self._max_search_moves, bound * (1 + WORTH_KICKING))
        return load, shortest.lower_bound_seconds

    def pack(self, lengths: np.ndarray) -> tuple[PackedLoad, float]:
        """Packed chunks of sequences of these ascending lengths, and a lower bound of the makespan (seconds).

        The load numbers sequences by falling length.
        """
        unique, column, counts = np.unique(lengths, return_inverse=True, return_counts=True)
        table = cost_table(self._groups, unique, Batching.PACKED)
        costs = class_costs(table, counts, class_ends(unique, counts, self._room_I, NUM_CLASSES))
        shortest = self._solver.shortest_step(costs, self._num_replicas_I)
        task = PackingTask(table, self._room_I, self._group_R, lengths[::-1], column[::-1], self._max_search_moves)
        bound, loads = shortest.lower_bound_seconds, []
        for order in Order:
            load = pack(task, whole_quotas(shortest.split.part, costs.demand), order)
            improve_packed(load, self._max_search_moves, bound * (1 + PACKED_GOOD_ENOUGH))
            loads.append(load)
            if load.replica_seconds().max() <= bound * (1 + SECOND_TRY):
                break
        return min(loads, key=lambda load: float(load.replica_seconds().max())), bound

    def _check_longest(self, longest: SequenceRef) -> None:
        roomiest = max(self._groups, key=lambda candidate: candidate.max_chunk_tokens)
        room, where = roomiest.max_chunk_tokens, f"roomiest replica {roomiest.config}"
        if self._fixed_uppers and self._fixed_uppers[-1] < room:
            room, where = self._fixed_uppers[-1], "last fixed bucket"
        if longest.num_tokens > room:
            raise PlanInfeasibleError(
                f"tenant {longest.tenant}, row {longest.row} has {longest.num_tokens} tokens, but the {where} holds "
                f"{room}; plan again with this data, or set tenants[].dataset.max_length <= {room}"
            )


def _padded_chunks(ordered: list[SequenceRef], batch: BucketCounts, load: Load) -> list[list[Chunk]]:
    """Deals each bucket's sequences to the replicas in order, a tenant's together: all cost the same there."""
    chunks: list[list[Chunk]] = [[] for _ in range(len(load.fixed))]
    num_chunks_RJ = -(-load.num_sequences // np.maximum(load.chunk, 1))
    borders = [0, *np.cumsum(batch.counts).tolist()]
    for bucket, padded_tokens in enumerate(batch.uppers.tolist()):
        members = sorted(ordered[borders[bucket] : borders[bucket + 1]], key=_by_row)
        first = 0
        for replica in np.flatnonzero(load.num_sequences[:, bucket]).tolist():
            count, num_chunks = int(load.num_sequences[replica, bucket]), int(num_chunks_RJ[replica, bucket])
            ends = [first + count * k // num_chunks for k in range(num_chunks + 1)]
            chunks[replica] += [Chunk(tuple(members[start:end]), padded_tokens) for start, end in pairwise(ends)]
            first += count
    return chunks


def _packed_chunks(ordered: list[SequenceRef], load: PackedLoad, num_replicas: int) -> list[list[Chunk]]:
    chunks: list[list[Chunk]] = [[] for _ in range(num_replicas)]
    members: dict[int, list[SequenceRef]] = {}
    for sequence, number in zip(reversed(ordered), load.chunk.tolist(), strict=True):
        members.setdefault(number, []).append(sequence)
    for number, own in members.items():
        chunks[int(load.chunk_home[number])].append(Chunk(tuple(sorted(own, key=_by_row)), None))
    return chunks
