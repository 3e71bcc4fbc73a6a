"""Packed chunks: whole sequences end to end, up to the replica's token budget, attention charged per sequence.

A chunk of replica r takes a_r + sum(b_r l + c_r l^2) over its sequences; a replica's step is the sum of its chunks and
(pp_r - 1) times its largest one (Eq. 12). Sequences go longest first, within the linear program's quotas, to the
replica of the group that finishes first, there into the fullest chunk with room. `packed_search` evens the replicas.
"""

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field

import numpy as np

from planning.shares import CostTable


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


def pack(task: PackingTask, quotas_IJ: np.ndarray) -> PackedLoad:
    """The first load; `quotas_IJ` are whole sequences per group and class, classes by rising length."""
    load = _empty(task)
    owner = _owners(quotas_IJ, np.argsort(-task.room_I, kind="stable"))
    for group in range(len(task.room_I)):
        _pack_group(load, np.flatnonzero(owner == group).tolist(), np.flatnonzero(task.group_R == group).tolist())
    return load


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


def _owners(quotas_IJ: np.ndarray, roomiest_first: np.ndarray) -> np.ndarray:
    """The group of each sequence (S): within a class the roomier group takes the longer ones."""
    groups = np.tile(roomiest_first, quotas_IJ.shape[1])
    # classes from the longest to the shortest, as the sequences are numbered
    return np.repeat(groups, quotas_IJ[roomiest_first][:, ::-1].T.ravel())


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
