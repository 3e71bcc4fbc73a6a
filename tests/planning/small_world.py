"""A world small enough to try everything: four configurations, their replicas, sequences of given lengths."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from planning.types import Candidate, ParallelConfig, Replica, ReplicaGroup, SequenceRef, replicas_of


def candidates_with(deep_pipeline_tokens: int) -> dict[ParallelConfig, Candidate]:
    """<1,1>, <1,2>, <2,1>, and <1,4> with room for so many tokens; seconds of small round numbers."""
    every = (
        Candidate(ParallelConfig(1, 1), 16, 0.4, 0.10, 0.002),
        Candidate(ParallelConfig(1, 2), 24, 0.2, 0.05, 0.001),
        Candidate(ParallelConfig(2, 1), 32, 0.5, 0.06, 0.001),
        Candidate(ParallelConfig(1, 4), deep_pipeline_tokens, 0.1, 0.025, 0.0005),
    )
    return {candidate.config: candidate for candidate in every}


def replicas_for(configs: Sequence[ParallelConfig]) -> tuple[Replica, ...]:
    return replicas_of(tuple(ReplicaGroup(config, count) for config, count in sorted(Counter(configs).items())))


def sequences_of(lengths: Sequence[int]) -> list[SequenceRef]:
    return [SequenceRef("abc"[row % 3], row, num_tokens) for row, num_tokens in enumerate(lengths)]


def partitions(items: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """All ways to split lengths into chunks."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for others in set(itertools.combinations(rest, size)):
            left = list(rest)
            for other in others:
                left.remove(other)
            for tail in partitions(tuple(left)):
                yield [(first, *others), *tail]
