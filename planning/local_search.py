"""Local search on whole sequences, always from the replica that finishes last.

A move takes q sequences of one bucket from it to another replica, with q one sequence, the last fragment of a chunk,
what fills up the receiver's last chunk, a full chunk of the receiver, or what evens both finishing times. When no
move helps, a swap gives q sequences of one bucket and takes q' of another. A step is taken only if both replicas
then finish earlier than the slowest did, so the largest finishing times fall and the search ends.
Moves are counted, never timed: the same load gives the same result on any machine.
"""

from dataclasses import dataclass

import numpy as np

from planning.assignment import Load
from planning.chunk_sizes import fit_chunk_sizes

IMPROVEMENT = 1e-9  # relative; smaller gains are rounding
DRIFT = 0.01  # relative; a kicked load that is worse by more is taken back
NUM_SWAP_PARTNERS = 8  # the replicas that finish first


def improve(load: Load, max_moves: int, good_enough_seconds: float) -> None:
    """Changes `load` in place until no step helps, `max_moves` were taken, or the makespan is good enough."""
    stage, largest = load.stage_and_largest()
    for _ in range(max_moves):
        seconds = stage + load.depth * largest.max(axis=1)
        source = int(seconds.argmax())
        if seconds[source] <= good_enough_seconds:
            return
        transfers = _best_move(load, stage, largest, source) or _best_swap(load, stage, largest, source)
        if not transfers:
            return
        for transfer in transfers:
            load.num_sequences[transfer.giver, transfer.bucket] -= transfer.count
            load.num_sequences[transfer.taker, transfer.bucket] += transfer.count
        changed = np.array([transfers[0].giver, transfers[0].taker])[:, None]
        bucket = np.arange(largest.shape[1])
        count = load.num_sequences[changed, bucket]
        stage[changed[:, 0]] = load.stage_seconds(changed, bucket, count).sum(axis=1)
        largest[changed[:, 0]] = load.largest_chunk_seconds(changed, bucket, count)


def settle(load: Load, max_moves: int, good_enough_seconds: float) -> None:
    """Moves and swaps, then the chunk sizes that suit what pipelines now hold, and moves again if these are better."""
    improve(load, max_moves, good_enough_seconds)
    if max_moves and fit_chunk_sizes(load):
        improve(load, max_moves, good_enough_seconds)


def kick(load: Load, num_kicks: int, max_moves: int, good_enough_seconds: float) -> None:
    """Random transfers, each improved again, from the last load not much worse; keeps the best.

    A local optimum of a handful of sequences may be per cents above the best load, which matters when plans compete.
    The transfers come from a fixed seed.
    """
    rng = np.random.default_rng(0)
    best, best_seconds = _state(load), float(load.replica_seconds().max())
    current_seconds = best_seconds
    for _ in range(num_kicks):
        if best_seconds <= good_enough_seconds:
            break
        before = _state(load)
        for _ in range(int(rng.integers(1, 4))):
            _transfer_at_random(load, rng)
        settle(load, max_moves, good_enough_seconds)
        seconds = float(load.replica_seconds().max())
        if seconds < best_seconds * (1 - IMPROVEMENT):
            best, best_seconds = _state(load), seconds
        if seconds <= current_seconds * (1 + DRIFT):
            current_seconds = seconds
        else:
            load.num_sequences[:], load.chunk[:] = before
    load.num_sequences[:], load.chunk[:] = best


def _state(load: Load) -> tuple[np.ndarray, np.ndarray]:
    """Copies of what the search changes."""
    return load.num_sequences.copy(), load.chunk.copy()


def _transfer_at_random(load: Load, rng: np.random.Generator) -> None:
    slowest = int(load.replica_seconds().argmax())
    giver = slowest if rng.random() < 0.5 else int(rng.integers(len(load.fixed)))
    held = np.flatnonzero(load.num_sequences[giver])
    if len(held):
        bucket = int(rng.choice(held))
        taker = int(rng.choice(np.flatnonzero(load.chunk[:, bucket] > 0)))
        count = int(rng.integers(1, load.num_sequences[giver, bucket] + 1))
        load.num_sequences[giver, bucket] -= count
        load.num_sequences[taker, bucket] += count


@dataclass(frozen=True, slots=True)
class _Transfer:
    giver: int
    taker: int
    bucket: int
    count: int


def _best_move(load: Load, stage: np.ndarray, largest: np.ndarray, source: int) -> list[_Transfer]:
    """The move after which the later of both replicas finishes earliest; none if no move helps. Axes: Q, J', R."""
    num_replicas = len(stage)
    bucket = np.flatnonzero(load.num_sequences[source])[:, None]
    taker = np.arange(num_replicas)
    seconds = stage + load.depth * largest.max(axis=1)
    count = _move_sizes(load, seconds, source, bucket, taker)
    left = load.num_sequences[source, bucket] - count
    source_after = _seconds_after(load, stage, largest, source, bucket, left)
    taker_after = _seconds_after(load, stage, largest, taker, bucket, load.num_sequences[taker, bucket] + count)
    later = np.maximum(source_after, taker_after)
    later[:, (load.chunk[taker, bucket] == 0) | (taker == source)] = np.inf
    best = np.unravel_index(int(later.argmin()), later.shape)
    if later[best] >= seconds[source] * (1 - IMPROVEMENT):
        return []
    return [_Transfer(source, int(best[2]), int(bucket[best[1], 0]), int(count[best]))]


def _move_sizes(load: Load, seconds: np.ndarray, source: int, bucket: np.ndarray, taker: np.ndarray) -> np.ndarray:
    """Sizes worth trying per (bucket of the source, taker); shape QJ'R, each from 1 to what the source has."""
    has = load.num_sequences[source, bucket]
    chunk, source_chunk = np.maximum(load.chunk[taker, bucket], 1), np.maximum(load.chunk[source, bucket], 1)
    even = (seconds[source] - seconds[taker] - load.fixed[taker]) / (
        load.variable[source, bucket] + load.variable[taker, bucket]
    )
    sizes = np.empty((5, len(bucket), len(taker)), dtype=np.int64)
    sizes[0] = 1
    sizes[1] = (has - 1) % source_chunk + 1
    sizes[2] = -load.num_sequences[taker, bucket] % chunk
    sizes[3] = chunk
    sizes[4] = even
    return np.clip(sizes, 1, has)


def _seconds_after(
    load: Load, stage: np.ndarray, largest: np.ndarray, replica: int | np.ndarray, bucket: np.ndarray, count: np.ndarray
) -> np.ndarray:
    """Seconds of a replica once it holds `count` sequences of a bucket instead of what it holds."""
    held = load.num_sequences[replica, bucket]
    replica_index = np.asarray(replica)
    stage_after = (
        stage[replica]
        + load.stage_seconds(replica_index, bucket, count)
        - load.stage_seconds(replica_index, bucket, held)
    )
    if not load.depth.any():
        return np.asarray(stage_after)
    others = _largest_of_others(largest)[replica, bucket]
    return np.asarray(
        stage_after + load.depth[replica] * np.maximum(others, load.largest_chunk_seconds(replica_index, bucket, count))
    )


def _largest_of_others(largest: np.ndarray) -> np.ndarray:
    """Per replica and bucket, the largest chunk among the replica's other buckets."""
    if largest.shape[1] == 1:
        return np.zeros_like(largest)
    top = np.partition(largest, -2, axis=1)
    return np.where(largest == top[:, -1:], top[:, -2:-1], top[:, -1:])


def _best_swap(load: Load, stage: np.ndarray, largest: np.ndarray, source: int) -> list[_Transfer]:
    """The swap after which the later of both replicas finishes earliest; none if no swap helps. Axes: P, X, Y.

    X are the source's options to give, Y those of each partner P.
    """
    seconds = stage + load.depth * largest.max(axis=1)
    first = np.argsort(seconds, kind="stable")[: NUM_SWAP_PARTNERS + 1]
    giver, partner = np.array([[source]]), first[first != source][:, None]
    given, taken = _options(load, giver), _options(load, partner)
    later = np.maximum(
        _seconds_after_swap(load, stage, largest, giver, given, taken),
        _seconds_after_swap(load, stage, largest, partner, taken, given).swapaxes(1, 2),
    )
    cannot_give = (given.count == 0) | (load.chunk[partner, given.bucket] == 0)
    cannot_take = (taken.count == 0) | (load.chunk[giver, taken.bucket] == 0)
    same_bucket = given.bucket[:, :, None] == taken.bucket[:, None, :]
    later[cannot_give[:, :, None] | cannot_take[:, None, :] | same_bucket] = np.inf
    if not later.size or later.min() >= seconds[source] * (1 - IMPROVEMENT):
        return []
    p, x, y = (int(index) for index in np.unravel_index(int(later.argmin()), later.shape))
    other = int(partner[p, 0])
    return [
        _Transfer(source, other, int(given.bucket[0, x]), int(given.count[0, x])),
        _Transfer(other, source, int(taken.bucket[0, y]), int(taken.count[p, y])),
    ]


@dataclass(frozen=True, slots=True)
class _Options:
    """What replicas may give: bucket and count (0: nothing), one column per option."""

    bucket: np.ndarray
    count: np.ndarray


def _options(load: Load, replica: np.ndarray) -> _Options:
    """One sequence, the last fragment of a chunk, or a full chunk of any bucket; `replica` is a column."""
    bucket = np.arange(load.chunk.shape[1])[None, :]
    held, chunk = load.num_sequences[replica, bucket], np.maximum(load.chunk[replica, bucket], 1)
    sizes = np.concatenate([np.ones_like(held), (held - 1) % chunk + 1, chunk], axis=1)
    return _Options(np.tile(bucket, 3), np.minimum(sizes, np.tile(held, 3)))


def _seconds_after_swap(
    load: Load, stage: np.ndarray, largest: np.ndarray, replica: np.ndarray, given: _Options, taken: _Options
) -> np.ndarray:
    """Seconds of each replica after it gives (axis 1) and takes (axis 2) sequences of two different buckets."""
    held_given, held_taken = load.num_sequences[replica, given.bucket], load.num_sequences[replica, taken.bucket]
    left, grown = held_given - given.count, held_taken + taken.count
    less = load.stage_seconds(replica, given.bucket, left) - load.stage_seconds(replica, given.bucket, held_given)
    more = load.stage_seconds(replica, taken.bucket, grown) - load.stage_seconds(replica, taken.bucket, held_taken)
    after = (stage[replica] + less)[:, :, None] + more[:, None, :]
    if not load.depth.any():
        return np.asarray(after)
    others = _largest_of_others(largest)[replica, given.bucket]
    rest = np.maximum(others, load.largest_chunk_seconds(replica, given.bucket, left))
    grown_chunk = load.largest_chunk_seconds(replica, taken.bucket, grown)
    return np.asarray(after + load.depth[replica][:, :, None] * np.maximum(rest[:, :, None], grown_chunk[:, None, :]))
