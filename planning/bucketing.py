"""Length buckets with the least padding, exactly, on all unique lengths.

With unique lengths u_1 < ... < u_U, n_i sequences of length u_i and P_i = n_1 + ... + n_i, the fewest tokens that the
first i lengths need in at most r buckets are (P_0 = D_r(0) = 0)

    D_r(i) = min over k of D_{r-1}(k) + u_i * (P_i - P_k)

For fixed r these are lines in u_i whose lower envelope is the lower convex hull of the points (P_k, D_{r-1}(k)): the
best k is the hull's tangent point of slope u_i. k need not be held below i: for k >= i the value is at least
D_{r-1}(i), because those extra sequences cost at least their own, longer lengths. O(R * U).

Covers the choice for one batch, or for expected counts; not the fixed buckets of baselines.
"""

from itertools import pairwise

import numpy as np

from planning.types import Bucket


def choose_buckets(lengths: np.ndarray, num_buckets: int) -> tuple[Bucket, ...]:
    """At most `num_buckets` buckets for sequences of these lengths (tokens, any order, repeats counted).

    Fewer when there are fewer unique lengths; the first starts at 0; no lengths give no buckets.
    """
    unique, counts = np.unique(np.asarray(lengths, dtype=np.int64), return_counts=True)
    return buckets_from(choose_uppers(unique, counts, num_buckets))


def choose_uppers(unique: np.ndarray, counts: np.ndarray, num_buckets: int) -> np.ndarray:
    """Upper ends (ascending) for ascending unique lengths that occur `counts` times, which may be fractions."""
    if len(unique) <= num_buckets:
        return unique
    points = np.concatenate([[0.0], np.cumsum(counts, dtype=np.float64)])
    tokens = np.concatenate([[0.0], unique * points[1:]])
    best_start: list[np.ndarray] = []
    for _ in range(num_buckets - 1):
        hull = _lower_hull(points, tokens)
        run, rise = points[hull], tokens[hull]
        slopes = (rise[1:] - rise[:-1]) / (run[1:] - run[:-1])
        start = hull[np.searchsorted(slopes, unique, side="left")]
        tokens = np.concatenate([[0.0], tokens[start] + unique * (points[1:] - points[start])])
        best_start.append(start)
    uppers: list[int] = []
    end = len(unique)
    for start in [*reversed(best_start), np.zeros_like(unique)]:
        if end == 0:
            break
        uppers.append(int(unique[end - 1]))
        end = min(int(start[end - 1]), end - 1)
    return np.array(uppers[::-1], dtype=np.int64)


def buckets_from(uppers: np.ndarray) -> tuple[Bucket, ...]:
    """Neighbouring buckets from 0 to the last upper end."""
    ends = [0, *uppers.tolist()]
    return tuple(Bucket(lower, upper) for lower, upper in pairwise(ends))


def _lower_hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Indices of the lower convex hull of points with ascending x.

    Every pass drops, at once, each point on or above the chord of its neighbours, which the hull cannot hold; when
    none is left the chain is convex. About ten passes over arrays are faster than one point at a time.
    """
    kept = np.arange(len(x))
    while True:
        run, rise = x[1:] - x[:-1], y[1:] - y[:-1]
        below = np.ones(len(x), dtype=bool)
        below[1:-1] = rise[:-1] * run[1:] < rise[1:] * run[:-1]
        stay = below.nonzero()[0]
        if len(stay) == len(x):
            return kept
        kept, x, y = kept[stay], x[stay], y[stay]
