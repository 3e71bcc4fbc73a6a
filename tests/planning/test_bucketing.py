"""Oracle: the quadratic dynamic program over all unique lengths, without the convex hull."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.bucketing import choose_buckets, choose_uppers
from planning.types import Bucket


def fewest_tokens(unique: np.ndarray, counts: np.ndarray, num_buckets: int) -> float:
    total = np.concatenate([[0.0], np.cumsum(counts)])
    best = np.concatenate([[0.0], unique * total[1:]])
    for _ in range(num_buckets - 1):
        best = np.array(
            [0.0]
            + [min(best[k] + unique[i] * (total[i + 1] - total[k]) for k in range(i + 1)) for i in range(len(unique))]
        )
    return float(best[-1])


def padded_tokens(uppers: np.ndarray, unique: np.ndarray, counts: np.ndarray) -> float:
    return float((uppers[np.searchsorted(uppers, unique)] * counts).sum())


lengths_with_gaps = st.lists(
    st.one_of(st.integers(1, 60), st.integers(500, 520), st.integers(4000, 16384)), min_size=1, max_size=60
)


@given(lengths=lengths_with_gaps, num_buckets=st.integers(1, 12))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_buckets_need_exactly_as_few_tokens_as_the_exhaustive_program(lengths: list[int], num_buckets: int) -> None:
    unique, counts = np.unique(lengths, return_counts=True)
    buckets = choose_buckets(np.array(lengths), num_buckets)
    assert len(buckets) <= num_buckets
    uppers = np.array([bucket.upper_tokens for bucket in buckets])
    assert padded_tokens(uppers, unique, counts) == fewest_tokens(unique, counts, num_buckets)


def test_fractional_counts_are_weighed_exactly() -> None:
    rng = np.random.default_rng(0)
    unique = np.unique(rng.integers(1, 3000, 80))
    counts = rng.random(len(unique))
    uppers = choose_uppers(unique, counts, 6)
    assert padded_tokens(uppers, unique, counts) == pytest.approx(fewest_tokens(unique, counts, 6), rel=1e-12)


def test_buckets_join_without_gaps_and_end_at_the_longest_sequence() -> None:
    assert choose_buckets(np.array([9, 2, 2, 2, 10]), 2) == (Bucket(0, 2), Bucket(2, 10))


def test_fewer_unique_lengths_than_buckets_pad_nothing() -> None:
    assert choose_buckets(np.array([7, 3, 7]), 5) == (Bucket(0, 3), Bucket(3, 7))


def test_no_lengths_give_no_buckets() -> None:
    assert choose_buckets(np.array([], dtype=np.int64), 4) == ()
