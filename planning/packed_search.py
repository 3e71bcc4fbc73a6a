"""Local search on packed chunks, always from the replica that finishes last.

A move takes one sequence from it to another replica, into the fullest chunk with room, or into a new one. When no move
helps, a swap gives a longer sequence and takes a shorter one; both change places in their chunks. A step is taken only
if both replicas then finish earlier than the slowest did. Steps are counted, never timed.
"""

from dataclasses import dataclass

import numpy as np

from planning.packing import PackedLoad

IMPROVEMENT = 1e-6  # relative; smaller gains are not worth a step
NUM_PARTNERS = 6  # the replicas that finish first


def improve_packed(load: PackedLoad, max_moves: int, good_enough_seconds: float) -> None:
    """Changes `load` in place until no step helps, `max_moves` were taken, or the makespan is good enough."""
    for _ in range(max_moves):
        seconds = load.replica_seconds()
        source = int(seconds.argmax())
        if seconds[source] <= good_enough_seconds:
            return
        order = np.argsort(seconds, kind="stable")[: NUM_PARTNERS + 1]
        partners = [int(replica) for replica in order if replica != source]
        giver = _Replica(load, source, float(seconds[source]))
        step = _best_move(load, giver, partners, seconds) or _best_swap(load, giver, partners, seconds)
        if step is None:
            return
        _apply(load, step)


@dataclass(frozen=True, slots=True)
class _Step:
    """Sequence `given` goes to chunk `number` (-1: a new one) of `taker`, and `taken`, if any, comes back."""

    later_seconds: float
    given: int
    taker: int
    number: int
    taken: int = -1


class _Replica:
    """A replica's chunks and sequences as arrays, and what it would take with one of them changed."""

    def __init__(self, load: PackedLoad, replica: int, seconds: float) -> None:
        self.replica, self.seconds = replica, seconds
        self.chunks = load.chunks_of(replica)
        self.chunk_seconds = load.seconds[self.chunks]
        self.depth, self.fixed = float(load.depth[replica]), float(load.fixed[replica])
        top = np.partition(np.append(self.chunk_seconds, [0.0, 0.0]), -2)
        self.largest, self.second = float(top[-1]), float(top[-2])
        self.stage = float(self.chunk_seconds.sum())

    def after(self, chunk_before: np.ndarray, chunk_after: np.ndarray) -> np.ndarray:
        """Seconds once a chunk of `chunk_before` seconds takes `chunk_after`; 0 is a chunk that is not there."""
        stage = self.stage + chunk_after - chunk_before
        if not self.depth:
            return np.asarray(stage)
        others = np.where(chunk_before >= self.largest, self.second, self.largest)
        return np.asarray(stage + self.depth * np.maximum(others, chunk_after))


def _best_move(load: PackedLoad, giver: _Replica, partners: list[int], seconds: np.ndarray) -> _Step | None:
    own = np.flatnonzero(load.home == giver.replica)
    number = load.chunk[own]
    before = load.seconds[number]
    left = np.where(load.size[number] == 1, 0.0, before - load.variable[giver.replica, own])
    given = giver.after(before, left)
    best: _Step | None = None
    for partner in partners:
        taker = _Replica(load, partner, float(seconds[partner]))
        by_free = taker.chunks[np.argsort(load.free[taker.chunks], kind="stable")]
        place = np.searchsorted(load.free[by_free], load.lengths[own])
        fits = place < len(by_free)
        target = np.where(fits, np.append(by_free, -1)[place], -1)
        target_before = np.where(fits, load.seconds[target], 0.0)
        target_after = np.where(fits, target_before, taker.fixed) + load.variable[partner, own]
        later = np.maximum(given, taker.after(target_before, target_after))
        k = int(later.argmin())
        if later[k] < giver.seconds * (1 - IMPROVEMENT) and (best is None or later[k] < best.later_seconds):
            best = _Step(float(later[k]), int(own[k]), partner, int(target[k]))
    return best


def _best_swap(load: PackedLoad, giver: _Replica, partners: list[int], seconds: np.ndarray) -> _Step | None:
    own = np.flatnonzero(load.home == giver.replica)
    own_chunk, own_length = load.chunk[own], load.lengths[own]
    best: _Step | None = None
    for partner in partners:
        taker = _Replica(load, partner, float(seconds[partner]))
        theirs = np.flatnonzero(load.home == partner)
        if not len(theirs):
            continue
        their_chunk, length = load.chunk[theirs], load.lengths[theirs]
        more = load.variable[partner, own][:, None] - load.variable[partner, theirs]
        less = load.variable[giver.replica, own][:, None] - load.variable[giver.replica, theirs]
        giver_before, taker_before = load.seconds[own_chunk][:, None], load.seconds[their_chunk]
        later = np.maximum(
            giver.after(giver_before, giver_before - less), taker.after(taker_before, taker_before + more)
        )
        longer = own_length[:, None] - length
        later[(longer <= 0) | (longer > load.free[their_chunk]) | ~np.isfinite(later)] = np.inf
        x, y = (int(k) for k in np.unravel_index(int(later.argmin()), later.shape))
        if later[x, y] < giver.seconds * (1 - IMPROVEMENT) and (best is None or later[x, y] < best.later_seconds):
            best = _Step(float(later[x, y]), int(own[x]), partner, int(their_chunk[y]), int(theirs[y]))
    return best


def _apply(load: PackedLoad, step: _Step) -> None:
    origin = int(load.chunk[step.given])
    if step.taken >= 0:
        _exchange(load, step.given, step.taken)
        return
    load.take(step.given)
    number = step.number if step.number >= 0 else load.open_chunk(step.taker)
    load.put(step.given, number)
    assert origin != number


def _exchange(load: PackedLoad, given: int, taken: int) -> None:
    first, second = int(load.chunk[given]), int(load.chunk[taken])
    for leaving, number, coming in ((given, first, taken), (taken, second, given)):
        replica = load.chunk_home[number]
        load.free[number] += load.lengths[leaving] - load.lengths[coming]
        load.seconds[number] += load.variable[replica, coming] - load.variable[replica, leaving]
    load.chunk[given], load.chunk[taken] = second, first
    load.home[given], load.home[taken] = load.chunk_home[second], load.chunk_home[first]
