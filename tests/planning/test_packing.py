"""Packed dispatch. Oracle: every way to put a few sequences into packed chunks of the replicas."""

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.candidates import Candidates
from planning.config import Batching
from planning.cost import replica_seconds
from planning.dispatch import Dispatcher
from planning.errors import PlanError, PlanInfeasibleError
from planning.metrics import tenant_shares
from planning.shares import cost_table, measured_shares
from planning.step_plan import Job, JobMember, StepPlan, Wave, check_plan, step_plan_from
from planning.types import Candidate, Chunk, ParallelConfig, Replica, SequenceRef
from planning.workload import Workload

from .small_world import candidates_with, partitions, replicas_for, sequences_of

CANDIDATES = candidates_with(deep_pipeline_tokens=20)
replica_groups = st.lists(st.sampled_from(sorted(CANDIDATES)), min_size=1, max_size=3)


@cache
def alone_seconds(config: ParallelConfig, lengths: tuple[int, ...]) -> float:
    """Shortest step of one replica with these sequences."""
    candidate = CANDIDATES[config]
    return min(
        (
            replica_seconds(candidate, [Chunk(tuple(sequences_of(chunk)), None) for chunk in chunks])
            for chunks in partitions(lengths)
            if all(sum(chunk) <= candidate.max_chunk_tokens for chunk in chunks)
        ),
        default=np.inf,
    )


def best_makespan(replicas: Sequence[Replica], lengths: Sequence[int]) -> float:
    def seconds(homes: tuple[int, ...]) -> float:
        own = [
            tuple(sorted(length for length, home in zip(lengths, homes, strict=True) if home == r))
            for r in range(len(replicas))
        ]
        return max(alone_seconds(replica.config, part) for replica, part in zip(replicas, own, strict=True))

    return min(map(seconds, itertools.product(range(len(replicas)), repeat=len(lengths))))


@given(configs=replica_groups, lengths=st.lists(st.integers(1, 16), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_makespan_lies_between_the_bound_and_close_to_the_best_packing(
    configs: list[ParallelConfig], lengths: list[int]
) -> None:
    replicas = replicas_for(configs)
    dispatch = Dispatcher(replicas, CANDIDATES, 4, 2000, Batching.PACKED).dispatch(sequences_of(lengths))
    best = best_makespan(replicas, lengths)
    assert dispatch.lower_bound_seconds <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= dispatch.predicted_seconds
    slack = max(CANDIDATES[config].config.pp * CANDIDATES[config].chunk_seconds(1, max(lengths)) for config in configs)
    assert dispatch.predicted_seconds <= best + slack


@given(
    configs=replica_groups,
    lengths=st.lists(st.integers(1, 16), max_size=80),
    shuffle=st.randoms(),
    moves=st.integers(0, 9),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_every_sequence_is_packed_once_within_the_budget_whatever_the_order(
    configs: list[ParallelConfig], lengths: list[int], shuffle: object, moves: int
) -> None:
    replicas, sequences = replicas_for(configs), sequences_of(lengths)
    dispatcher = Dispatcher(replicas, CANDIDATES, 4, moves, Batching.PACKED)
    dispatch = dispatcher.dispatch(sequences)
    check_plan(step_plan_from(0, dispatch, {}), sequences, replicas, CANDIDATES)
    shuffled = list(sequences)
    shuffle.shuffle(shuffled)  # type: ignore[attr-defined]
    assert dispatcher.dispatch(shuffled) == dispatch
    assert dispatch.padding_ratio == 0
    assert dispatch.lower_bound_seconds <= dispatch.predicted_seconds * (1 + 1e-9)


@given(
    config=st.sampled_from(sorted(CANDIDATES)),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    slack=st.floats(1.0, 3.0),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_shares_of_a_replica_never_exceed_the_part_of_the_step_that_it_takes(
    config: ParallelConfig, lengths: list[int], slack: float
) -> None:
    step_seconds = alone_seconds(config, tuple(sorted(lengths))) * slack
    table = cost_table([CANDIDATES[config]], np.array(sorted(lengths)), Batching.PACKED)
    assert (measured_shares(table, step_seconds).sum(axis=2) <= (1 + 1e-9) / slack).all()


def test_the_load_of_the_search_is_the_load_of_the_chunks() -> None:
    replicas = replicas_for([ParallelConfig(1, 1), ParallelConfig(1, 4), ParallelConfig(2, 1)])
    dispatcher = Dispatcher(replicas, CANDIDATES, 4, 500, Batching.PACKED)
    for seed in range(10):
        lengths = np.random.default_rng(seed).integers(1, 17, 60)
        load, _ = dispatcher.pack(np.sort(lengths))
        dispatch = dispatcher.dispatch(sequences_of(lengths.tolist()))
        assert load.replica_seconds() == pytest.approx(np.array(dispatch.replica_seconds))


@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=40), room=st.integers(16, 40), more=st.integers(1, 60))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_larger_budget_never_needs_more_packed_chunks(lengths: list[int], room: int, more: int) -> None:
    config = ParallelConfig(1, 1)
    # only opening a chunk costs anything worth the name
    numbers = [
        len(
            Dispatcher(
                replicas_for([config]), {config: Candidate(config, tokens, 1.0, 1e-6, 0.0)}, 4, 100, Batching.PACKED
            )
            .dispatch(sequences_of(lengths))
            .chunks[0]
        )
        for tokens in (room, room + more)
    ]
    assert numbers[1] <= numbers[0]


def test_a_sequence_exactly_at_the_budget_fills_a_chunk_alone() -> None:
    dispatch = Dispatcher(replicas_for([ParallelConfig(1, 1)]), CANDIDATES, 4, 100, Batching.PACKED).dispatch(
        sequences_of([16, 1, 15])
    )
    assert sorted(chunk.num_tokens for chunk in dispatch.chunks[0]) == [16, 16]


def test_a_sequence_beyond_every_replica_is_refused() -> None:
    dispatcher = Dispatcher(replicas_for([ParallelConfig(1, 1)]), CANDIDATES, 4, 100, Batching.PACKED)
    with pytest.raises(PlanInfeasibleError, match=r"17 tokens.*<1,1> holds 16.*max_length <= 16"):
        dispatcher.dispatch(sequences_of([3, 17]))


def test_costs_without_fixed_or_quadratic_part_are_dispatched() -> None:
    config = ParallelConfig(1, 2)
    only = {config: Candidate(config, 10, 0.0, 0.1, 0.0)}
    dispatch = Dispatcher(replicas_for([config]), only, 4, 100, Batching.PACKED).dispatch(sequences_of([5, 5, 5]))
    assert dispatch.lower_bound_seconds <= dispatch.predicted_seconds


def test_an_overfull_packed_chunk_is_rejected() -> None:
    replicas = replicas_for([ParallelConfig(1, 1)])
    sequences = sequences_of([9, 8])
    plan = StepPlan(0, (Wave((Job((JobMember(0, (Chunk(tuple(sequences), None),)),)),)),), {})
    with pytest.raises(PlanError, match=r"17 tokens \(packed\) exceeds the 16"):
        check_plan(plan, sequences, replicas, CANDIDATES)
    good = StepPlan(0, (Wave((Job((JobMember(0, (Chunk((sequences[0],), None),)),)),)),), {})
    assert StepPlan.from_json(good.to_json()) == good
    assert '"padded_tokens":null' in good.to_json()


def test_sequences_of_a_packed_chunk_pay_for_their_own_attention() -> None:
    config = ParallelConfig(1, 1)
    long, short = SequenceRef("long", 0, 10), SequenceRef("short", 0, 5)
    shares = tenant_shares([[Chunk((long, short), None)]], replicas_for([config]), CANDIDATES)
    long_work, short_work = 10 * 0.1 + 100 * 0.002, 5 * 0.1 + 25 * 0.002
    assert shares["long"] == pytest.approx(long_work / (long_work + short_work))


def test_the_papers_plan_is_packed_close_to_its_bound(
    seven_b_workload: Workload, seven_b_candidates: Candidates, replicas: Callable[..., tuple[Replica, ...]]
) -> None:
    dispatcher = Dispatcher(
        replicas((8, 1, 1), (2, 1, 1), (1, 1, 6)), seven_b_candidates.by_config, 16, 2000, Batching.PACKED
    )
    gaps = []
    for seed in range(8):
        dispatch = dispatcher.dispatch(seven_b_workload.sample_step(np.random.default_rng(seed)))
        gaps.append(dispatch.predicted_seconds / dispatch.lower_bound_seconds - 1)
    # 0.8 % when written
    assert min(gaps) >= 0
    assert np.mean(gaps) < 0.012
    assert max(gaps) < 0.02
