"""What-if curves: how many GPUs are worth having."""

import pytest

from planning.types import DeploymentPlan, ParallelConfig, ReplicaGroup
from planning.what_if import doubled_gpus, judge


def plan(num_gpus: int, step_seconds: float) -> DeploymentPlan:
    return DeploymentPlan(
        groups=(ReplicaGroup(ParallelConfig(1, 1), num_gpus),),
        num_gpus=num_gpus,
        predicted_step_seconds=step_seconds,
        lower_bound_seconds=0.5,
        solve_seconds=0.0,
        tenant_gpu_seconds={"a": num_gpus * step_seconds},
        pruned=(),
        alternatives=(),
        longest_alone_seconds=0.5,
    )


def test_numbers_double_and_end_where_asked() -> None:
    assert (doubled_gpus(64), doubled_gpus(20), doubled_gpus(4)) == ((8, 16, 32, 64), (8, 16, 20), (4,))


def test_useless_gpus_are_named_with_the_reason() -> None:
    answer = judge([plan(8, 2.0), plan(16, 1.0), plan(32, 0.99)])
    assert answer.useful_gpus == 16
    assert "longest sequence of a step alone takes 0.5 s" in answer.reason


def test_as_long_as_steps_shorten_all_gpus_are_useful() -> None:
    answer = judge([plan(16, 1.0), plan(8, 2.0)])
    assert answer.useful_gpus == 16
    assert "from 16 to 16" in answer.reason


def test_a_faster_smaller_plan_stands_for_more_gpus_and_idle_ones_are_paid() -> None:
    last = judge([plan(8, 1.0), plan(16, 1.1)]).plans[-1]
    assert (last.num_gpus, last.num_used_gpus, last.predicted_step_seconds) == (16, 8, 1.0)
    assert last.tenant_gpu_seconds["a"] == pytest.approx(16.0)
