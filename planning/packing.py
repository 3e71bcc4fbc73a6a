"""Packed chunks: whole sequences end to end, up to the replica's token budget, attention charged per sequence.

A chunk of replica r takes a_r + sum(b_r l + c_r l^2) over its sequences; a replica's step is the sum of its chunks and
(pp_r - 1) times its largest one (Eq. 12). Sequences go longest first, within the linear program's quotas, to the
replica of the group that finishes first, there into the fullest chunk with room. `packed_search` evens the replicas.
"""

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from planning.shares import CostTable

MAX_FILLED = 160  # sequences of a lone replica that are packed chunk by chunk


@dataclass(slots=True, eq=False)
class PackedLoad:
    """One step's chunks while they are made; sequences are numbered by falling length.

    Shapes: `lengths`, `home`, `chunk` (S: tokens, replica, chunk number); `fixed`, `depth`, `room` (R);
    `variable` (R, S) seconds of each sequence on each replica, without the fixed term, infinite where it does not fit;
    `chunk_home`, `free`, `seconds`, `size` per chunk: replica, tokens left, seconds on one stage, sequences.
    """

    lengths: np.ndarray
    fixed: np.ndarray
    depth: np.ndarray
    room: np.ndarray
    variable: np.ndarray
    home: np.ndarray
    chunk: np.ndarray
    chunk_home: np.ndarray
    free: np.ndarray
    seconds: np.ndarray
    size: np.ndarray
    num_chunks: int = field(default=0)

    def open_chunk(self, replica: int) -> int:
        """A new, empty chunk of a replica."""
        number = self.num_chunks
        self.chunk_home[number] = replica
        self.free[number] = self.room[replica]
        self.seconds[number] = self.fixed[replica]
        self.num_chunks += 1
        return number

    def put(self, sequence: int, number: int) -> None:
        """Add a sequence to a chunk with room for it."""
        self.home[sequence], self.chunk[sequence] = self.chunk_home[number], number
        self.free[number] -= self.lengths[sequence]
        self.seconds[number] += self.variable[self.chunk_home[number], sequence]
        self.size[number] += 1

    def take(self, sequence: int) -> None:
        """Remove a sequence from its chunk; an emptied chunk belongs to no replica any more."""
        number = int(self.chunk[sequence])
        self.free[number] += self.lengths[sequence]
        self.seconds[number] -= self.variable[self.chunk_home[number], sequence]
        self.size[number] -= 1
        if not self.size[number]:
            self.chunk_home[number] = -1

    def chunks_of(self, replica: int) -> np.ndarray:
        """Numbers of a replica's chunks."""
        return np.flatnonzero(self.chunk_home[: self.num_chunks] == replica)

    def replica_seconds(self) -> np.ndarray:
        """Seconds of each replica's step (R)."""
        used = self.chunk_home[: self.num_chunks] >= 0
        home, seconds = self.chunk_home[: self.num_chunks][used], self.seconds[: self.num_chunks][used]
        stage = np.bincount(home, weights=seconds, minlength=len(self.fixed))
        largest = np.zeros(len(self.fixed))
        np.maximum.at(largest, home, seconds)
        return np.asarray(stage + self.depth * largest)


@dataclass(frozen=True, slots=True, eq=False)
class PackingTask:
    """What is packed onto what: `lengths` (S) falling, `column[s]` the table's column of sequence s; `group_R`.

    `max_moves` of the search that follows: each may open a chunk.
    """

    table: CostTable
    room_I: np.ndarray
    group_R: np.ndarray
    lengths: np.ndarray
    column: np.ndarray
    max_moves: int


class Order(Enum):
    """Which sequences of a class that is split go to the roomier group."""

    SHORTER_TO_ROOMIER = -1  # first: they fill what longer sequences leave
    LONGER_TO_ROOMIER = 1


def pack(task: PackingTask, quotas_IJ: np.ndarray, order: Order) -> PackedLoad:
    """The first load; `quotas_IJ` are whole sequences per group and class, classes by rising length."""
    load = _empty(task)
    owner = _owners(quotas_IJ, np.argsort(-order.value * task.room_I, kind="stable"))
    for group in range(len(task.room_I)):
        sequences, replicas = np.flatnonzero(owner == group).tolist(), np.flatnonzero(task.group_R == group).tolist()
        if len(replicas) == 1 and len(sequences) <= MAX_FILLED:
            _fill_one(load, sequences, replicas[0])
        else:
            _pack_group(load, sequences, replicas)
    return load


def _fill_one(load: PackedLoad, sequences: list[int], replica: int) -> None:
    """Chunk after chunk: the longest sequence left, then the one or two others that fill it best."""
    rising = sorted((int(load.lengths[sequence]), sequence) for sequence in sequences)
    while rising:
        tokens, sequence = rising.pop()
        number = load.open_chunk(replica)
        load.put(sequence, number)
        free = int(load.room[replica]) - tokens
        while chosen := _best_filling(rising, free):
            for place in sorted(chosen, reverse=True):
                tokens, sequence = rising.pop(place)
                load.put(sequence, number)
                free -= tokens


def _best_filling(rising: list[tuple[int, int]], free: int) -> list[int]:
    """Places of one or two sequences, of (tokens, number) by rising tokens, that leave the least room."""
    last = bisect_left(rising, (free + 1, -1)) - 1
    if last < 0:
        return []
    best, most = [last], rising[last][0]
    for first in range(last, 0, -1):
        other = min(first, bisect_left(rising, (free - rising[first][0] + 1, -1))) - 1
        if other >= 0 and rising[first][0] + rising[other][0] > most:
            best, most = [first, other], rising[first][0] + rising[other][0]
    return best


def _empty(task: PackingTask) -> PackedLoad:
    table, lengths, group_R = task.table, task.lengths, task.group_R
    variable = np.where(table.capacity > 0, table.variable, np.inf)
    most = len(lengths) + task.max_moves
    return PackedLoad(
        lengths=lengths,
        fixed=table.fixed[group_R],
        depth=table.depth[group_R],
        room=task.room_I[group_R],
        variable=variable[group_R][:, task.column],
        home=np.full(len(lengths), -1),
        chunk=np.full(len(lengths), -1),
        chunk_home=np.full(most, -1),
        free=np.zeros(most, dtype=np.int64),
        seconds=np.zeros(most),
        size=np.zeros(most, dtype=np.int64),
    )


def _owners(quotas_IJ: np.ndarray, longer_first: np.ndarray) -> np.ndarray:
    """The group of each sequence (S): within a class the groups take them in this order."""
    groups = np.tile(longer_first, quotas_IJ.shape[1])
    # classes from the longest to the shortest, as the sequences are numbered
    return np.repeat(groups, quotas_IJ[longer_first][:, ::-1].T.ravel())


def _pack_group(load: PackedLoad, sequences: list[int], replicas: list[int]) -> None:
    heap = [(0.0, replica) for replica in replicas]
    open_chunks: dict[int, list[tuple[int, int]]] = {replica: [] for replica in replicas}
    lengths = load.lengths.tolist()
    if not replicas:
        return
    variable = load.variable[replicas[0]].tolist()
    fixed = float(load.fixed[replicas[0]])
    for sequence in sequences:
        seconds, replica = heap[0]
        own, tokens = open_chunks[replica], lengths[sequence]
        place = bisect_left(own, (tokens, -1))
        if place < len(own):
            free, number = own.pop(place)
        else:
            number = load.open_chunk(replica)
            free, seconds = int(load.room[replica]), seconds + fixed
        load.chunk[sequence], load.home[sequence] = number, replica
        if free > tokens:
            insort(own, (free - tokens, number))
        heapq.heapreplace(heap, (seconds + variable[sequence], replica))
    own_sequences = np.array(sequences, dtype=np.int64)
    numbers = load.chunk[own_sequences]
    np.subtract.at(load.free, numbers, load.lengths[own_sequences])
    np.add.at(load.seconds, numbers, load.variable[replicas[0]][own_sequences])
    np.add.at(load.size, numbers, 1)
