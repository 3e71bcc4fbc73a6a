"""Step plans survive JSON, and check_plan rejects every planted fault."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from planning.candidates import Candidates
from planning.dispatch import Dispatcher
from planning.errors import PlanError
from planning.step_plan import Job, JobMember, StepPlan, Wave, check_plan, step_plan_from
from planning.types import Chunk, Replica, SequenceRef

A, B, C = SequenceRef("a", 0, 8), SequenceRef("a", 1, 6), SequenceRef("b", 0, 7)


@pytest.fixture
def two_replicas(replicas: Callable[..., tuple[Replica, ...]]) -> tuple[Replica, ...]:
    return replicas((1, 1, 2))  # each holds 16 tokens


def plan_of(*chunks_per_replica: list[Chunk]) -> StepPlan:
    jobs = tuple(Job((JobMember(r, tuple(chunks)),)) for r, chunks in enumerate(chunks_per_replica))
    return StepPlan(5, (Wave(jobs),), {"a": 3, "b": 4})


GOOD = plan_of([Chunk((A, C), 8)], [Chunk((B,), 6)])


def test_a_good_plan_passes(two_replicas: tuple[Replica, ...], small_candidates: Candidates) -> None:
    check_plan(GOOD, [A, B, C], two_replicas, small_candidates.by_config)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (plan_of([Chunk((A, C), 8)]), r"a, row 1 \(6 tokens\) is missing"),
        (plan_of([Chunk((A, C), 8)], [Chunk((B,), 6), Chunk((B,), 6)]), "row 1.*planned 2 times"),
        (plan_of([Chunk((A, C), 8)], [Chunk((B, SequenceRef("z", 9, 2)), 6)]), "tenant z, row 9.*not part of the step"),
        (plan_of([Chunk((A, C), 9)], [Chunk((B,), 6)]), r"18 tokens \(2 x 9\) exceeds the 16"),
        (plan_of([Chunk((A, C), 7)], [Chunk((B,), 6)]), "row 0.*does not fit into a chunk of 7"),
        (plan_of([Chunk((A, C), 8)], [Chunk((B,), 6)], [Chunk((), 4)]), "replica 2 is unknown"),
        (plan_of([Chunk((A, C), 8), Chunk((), 4)], [Chunk((B,), 6)]), "holds no sequence"),
        (replace(GOOD, waves=(Wave(GOOD.waves[0].jobs * 2),)), "replica 0 stands twice in wave 0"),
        (replace(GOOD, waves=GOOD.waves * 2), "planned 2 times"),
    ],
)
def test_planted_faults_are_rejected(
    plan: StepPlan, message: str, two_replicas: tuple[Replica, ...], small_candidates: Candidates
) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(plan, [A, B, C], two_replicas, small_candidates.by_config)


def test_a_replica_finds_its_chunks_over_all_waves_in_order() -> None:
    waves = (*GOOD.waves, Wave((Job((JobMember(1, (Chunk((A,), 8),)),)),)))
    plan = replace(GOOD, waves=waves)
    assert plan.chunks_of(0) == (Chunk((A, C), 8),)
    assert plan.chunks_of(1) == (Chunk((B,), 6), Chunk((A,), 8))
    assert plan.chunks_of(2) == ()


def test_the_same_replica_may_work_in_two_waves(
    two_replicas: tuple[Replica, ...], small_candidates: Candidates
) -> None:
    waves = tuple(Wave((Job((JobMember(0, (chunk,)),)),)) for chunk in (Chunk((A, C), 8), Chunk((B,), 6)))
    check_plan(StepPlan(0, waves, {}), [A, B, C], two_replicas, small_candidates.by_config)


def test_dispatches_become_one_wave_of_busy_replicas(
    two_replicas: tuple[Replica, ...], small_candidates: Candidates
) -> None:
    dispatch = Dispatcher(two_replicas, small_candidates.by_config, 4, 100).dispatch([A])
    plan = step_plan_from(7, dispatch, {"a": 1})
    assert [[len(job.members) for job in wave.jobs] for wave in plan.waves] == [[1]]
    check_plan(plan, [A], two_replicas, small_candidates.by_config)


def test_json_round_trips_and_is_self_describing() -> None:
    text = GOOD.to_json()
    assert StepPlan.from_json(text) == GOOD
    first = json.loads(text)["waves"][0]["jobs"][0]["members"][0]
    assert first == {"replica": 0, "chunks": [{"padded_tokens": 8, "sequences": [["a", 0, 8], ["b", 0, 7]]}]}
    assert json.loads(text)["schema_version"] == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", GOOD.to_json().replace('"padded_tokens":8,', ""), GOOD.to_json().replace("0,8", '"x",8')]
)
def test_a_damaged_step_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="damaged"):
        StepPlan.from_json(text)


def test_another_version_is_refused() -> None:
    with pytest.raises(PlanError, match="schema_version 2"):
        StepPlan.from_json(GOOD.to_json().replace('"schema_version":1', '"schema_version":2'))
