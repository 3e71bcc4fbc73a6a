"""What part of a replica's step does one sequence take, when the step lasts T seconds? The linear core of planning.

A chunk of q sequences of bucket j on configuration i takes `a_i + A_ij q` seconds per stage, with
`A_ij = b_i s_j + c_i s_j^2` and q at most `floor(max_chunk_tokens_i / s_j)`. By Eq. 12 a replica whose largest chunk
takes m seconds has `T - (pp_i - 1) m` seconds for chunks. Each of its chunks takes at most m, so dividing each by the
time that would remain if it were the largest one itself never overstates its part:

    share_ij(T) = min over q of (A_ij + a_i / q) / (T - (pp_i - 1) (a_i + A_ij q))
    any replica done after T' <= T has  sum_j share_ij n_j <= (T' - (pp_i - 1) m) / (T - (pp_i - 1) m) <= T' / T     (*)

Packed chunks mix lengths, M tokens in all at most, v = sum of b l + c l^2 over their sequences. A chunk's part
f(v) = (a + v) / (T - (pp - 1) (a + v)) is convex, so the tangent at any chunk of s seconds bounds it from below. Of
what the tangent leaves at v = 0, e(s), sequence l may claim e l / M; beyond the tangent's point (f(v) - e) / v rises:

    share_il(T) = e l / M + v_l * (f'(s) if v_l is below the tangent's point, else (f(v_l) - e) / v_l)

The tangent stands at s = sqrt(a T / (pp - 1)), where e = 0, or at a full chunk if that is shorter. With pp = 1 this is
(a l / M + v_l) / T: the padded formula for a chunk of M / l sequences, fractions allowed.

So linear programs over (*) give true bounds, bubbles included. With pp = 1 the best q is the full chunk. With pp > 1
the derivative vanishes at `A q = sqrt(a^2 + a D / (pp - 1)) - a`, `D = T - (pp - 1) a`: large chunks spread the fixed
term, small ones shorten the bubble. By (*), for any T and load r(T), the smallest possible largest sum, every step
takes at least `T * min(1, r(T))` seconds, and r(T) > 1 means T is too short.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planning.config import Batching
from planning.types import Candidate

BISECTION_TOLERANCE = 1e-4
DUAL_FEASIBLE = (1, 2, 3)
ROUNDING = 1e-9  # a sequence that alone takes exactly T still fits into T


@dataclass(frozen=True, slots=True)
class CostTable:
    """Cost of I configurations on J sequence lengths (tokens, as computed).

    Shapes: `fixed`, `depth` (pp - 1) and `num_gpus` (I); `variable` (I, J) seconds per sequence without the fixed term;
    `capacity` (I, J) sequences of that length per chunk, 0 where not even one fits; whole ones where padded;
    `part` (K, I, J) part of a chunk that one sequence takes, by K measures none of which any chunk's sequences exceed.
    """

    batching: Batching
    fixed: np.ndarray
    depth: np.ndarray
    num_gpus: np.ndarray
    variable: np.ndarray
    capacity: np.ndarray
    part: np.ndarray

    @property
    def least_seconds(self) -> np.ndarray:
        """Seconds per sequence in full chunks, shape (I, J); infinite where not even one fits."""
        capacity = np.maximum(self.capacity, 1)
        return np.where(self.capacity > 0, self.variable + self.fixed[:, None] / capacity, np.inf)

    @property
    def alone_seconds(self) -> np.ndarray:
        """Seconds of one sequence alone on a replica, bubble included, shape (I, J); infinite where it does not fit."""
        alone = (self.depth[:, None] + 1) * (self.fixed[:, None] + self.variable)
        return np.where(self.capacity > 0, alone, np.inf)


def cost_table(candidates: Sequence[Candidate], lengths: np.ndarray, batching: Batching = Batching.PADDED) -> CostTable:
    """The cost of each candidate (rows) on each length (columns)."""
    linear = np.array([candidate.seconds_per_token for candidate in candidates])
    square = np.array([candidate.seconds_per_token2 for candidate in candidates])
    room = np.array([candidate.max_chunk_tokens for candidate in candidates], dtype=np.int64)
    whole = room[:, None] // lengths
    packed = batching is Batching.PACKED
    capacity = np.where(whole > 0, room[:, None] / lengths, 0.0) if packed else whole
    part = np.where(whole > 0, 1.0 / np.maximum(capacity, 1.0), 0.0)
    return CostTable(
        batching=batching,
        fixed=np.array([candidate.fixed_seconds for candidate in candidates]),
        depth=np.array([candidate.config.pp - 1 for candidate in candidates]),
        num_gpus=np.array([candidate.config.num_gpus for candidate in candidates]),
        variable=(linear[:, None] + square[:, None] * lengths) * lengths,
        capacity=capacity,
        part=np.stack([part, *(_dual_feasible(part, k) for k in DUAL_FEASIBLE)]) if packed else part[None],
    )


def _dual_feasible(part: np.ndarray, k: int) -> np.ndarray:
    """A bin-packing bound that knows waste: for k = 1 whatever exceeds half a chunk takes a whole one, for 2 thirds.

    x where (k + 1) x is whole, else floor((k + 1) x) / k (Fekete and Schepers 2001).
    """
    scaled = (k + 1) * part
    whole = np.abs(scaled - np.round(scaled)) < ROUNDING
    return np.where(whole, part, np.floor(scaled) / k)


def class_table(table: CostTable, counts: np.ndarray, ends: np.ndarray) -> CostTable:
    """The table of classes of neighbouring lengths, each up to and including column `ends[k]`; costs are class means.

    A class fits where its longest length does.
    """
    starts = np.concatenate([[0], ends[:-1] + 1])
    total = np.add.reduceat(counts, starts)
    part = np.add.reduceat(table.part * counts, starts, axis=2) / total
    fits = table.capacity[:, ends] > 0
    return replace(
        table,
        variable=np.add.reduceat(table.variable * counts, starts, axis=1) / total,
        capacity=np.where(fits, 1 / np.where(fits, part[0], 1.0), 0.0),
        part=part,
    )


def shares(table: CostTable, step_seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """`share_IJ` at T = `step_seconds` (infinite where one sequence alone takes longer) and its q_IJ (packed: 1)."""
    if table.batching is Batching.PACKED:
        return _packed_shares(table, step_seconds)[0], np.ones(table.variable.shape, dtype=np.int64)
    fixed, depth = table.fixed[:, None], table.depth[:, None]
    room = np.maximum(step_seconds - depth * fixed, 0.0)
    best = (np.sqrt(fixed**2 + fixed * room / np.maximum(depth, 1)) - fixed) / table.variable
    best = np.where(depth > 0, np.minimum(best, table.capacity), table.capacity)
    alone_fits = table.alone_seconds <= step_seconds * (1 + ROUNDING)
    share, chunk = np.full(best.shape, np.inf), np.ones(best.shape, dtype=np.int64)
    for whole in (np.floor(best), np.ceil(best)):
        q = np.maximum(whole, 1.0)
        seconds = fixed + table.variable * q
        left = step_seconds - depth * seconds
        usable = alone_fits & (left > 0)
        value = np.where(usable, seconds / (q * np.where(usable, left, 1.0)), np.inf)
        chunk = np.where(value < share, q.astype(np.int64), chunk)
        share = np.minimum(value, share)
    return share, chunk


def measured_shares(table: CostTable, step_seconds: float) -> np.ndarray:
    """`share_KIJ` by each measure of `part`; a replica that meets T obeys (*) for every one of them."""
    if table.batching is Batching.PACKED:
        return _packed_shares(table, step_seconds)
    return shares(table, step_seconds)[0][None]


def _packed_shares(table: CostTable, step_seconds: float) -> np.ndarray:
    fixed, depth = table.fixed[:, None], table.depth[:, None]
    alone_fits = table.alone_seconds <= step_seconds * (1 + ROUNDING)
    full = fixed + np.max(table.variable * table.capacity, axis=1, keepdims=True)
    tangent = np.minimum(np.sqrt(fixed * step_seconds / np.maximum(depth, 1)), full)
    tangent = np.where(depth > 0, np.minimum(tangent, step_seconds / (depth + 1)), 0.0)
    slope = step_seconds / (step_seconds - depth * tangent) ** 2
    rest = np.maximum(slope * fixed - depth * (tangent / (step_seconds - depth * tangent)) ** 2, 0.0)
    alone = fixed + table.variable
    left = np.where(alone_fits, step_seconds - depth * alone, 1.0)
    per_sequence = np.where(alone <= tangent, slope * table.variable, alone / left - rest)
    per_sequence = np.where(depth > 0, per_sequence, table.variable / step_seconds)
    return np.where(alone_fits & (left > 0), per_sequence + rest * table.part, np.inf)


def longest_alone(table: CostTable, present_I: np.ndarray) -> float:
    """Seconds of the longest sequence alone on the configuration that is fastest for it; infinite if none holds it."""
    return float(table.alone_seconds[present_I].min(axis=0).max())


def fractional_step(table: CostTable, demand_J: np.ndarray, num_gpus: int) -> float:
    """Seconds of the step if GPUs could be split into fractions of replicas.

    The smallest T with `sum_j demand_j min_i num_gpus_i share_ij(T) <= num_gpus`, found by bisection. Every length
    must fit on some configuration.
    """
    gpu_seconds = (table.num_gpus[:, None] * table.least_seconds).min(axis=0)
    low = high = max(float(demand_J @ gpu_seconds) / num_gpus, longest_alone(table, np.full(len(table.depth), True)))

    def too_short(seconds: float) -> bool:
        share, _ = shares(table, seconds)
        return bool(demand_J @ (table.num_gpus[:, None] * share).min(axis=0) > num_gpus)

    while too_short(high):
        low, high = high, 2 * high
    while high - low > BISECTION_TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if too_short(middle) else (low, middle)
    return high
