"""The estimate of a run against the cost of its steps, by hand and by simulation."""

import numpy as np
import pytest

from planning.config import PlannerConfig
from planning.estimate import estimated_gpu_seconds
from planning.strategies import Phase
from planning.types import Candidate, DeploymentPlan, ParallelConfig, ReplicaGroup
from planning.workload import TenantWorkload, Workload

ONE = ParallelConfig(1, 1)
CANDIDATES = {ONE: Candidate(ONE, 100, fixed_seconds=0.5, seconds_per_token=0.01, seconds_per_token2=0.0)}
PLAN = DeploymentPlan(
    groups=(ReplicaGroup(ONE, 2),),
    num_gpus=3,  # one is left out, and costs
    predicted_step_seconds=1.0,
    lower_bound_seconds=1.0,
    solve_seconds=0.0,
    tenant_gpu_seconds={},
    pruned=(),
    alternatives=(),
)


def tenant(name: str, length: int, batch_size: int) -> TenantWorkload:
    return TenantWorkload(name, np.array([length]), np.array([1]), batch_size)


def test_the_one_who_trains_longest_pays_for_the_replica_that_is_left_idle() -> None:
    workload = Workload((tenant("a", 50, 1), tenant("b", 100, 1)))
    phases = (Phase(("a", "b"), PLAN),)
    estimate = estimated_gpu_seconds(phases, {"a": 4, "b": 10}, workload, CANDIDATES, PlannerConfig())
    # together: 1 and 1.5 seconds side by side, 3 GPUs x 1.5 s in all; alone: b, 3 GPUs x 1.5 s
    assert estimate == pytest.approx({"a": 4 * 4.5 * 1.0 / 2.5, "b": 4 * 4.5 * 1.5 / 2.5 + 6 * 4.5})


def test_phases_one_after_the_other_add_up() -> None:
    workload = Workload((tenant("a", 50, 2), tenant("b", 100, 1)))
    phases = (Phase(("a",), PLAN), Phase(("b",), PLAN))
    estimate = estimated_gpu_seconds(phases, {"a": 4, "b": 10}, workload, CANDIDATES, PlannerConfig())
    assert estimate == pytest.approx({"a": 4 * 3 * 1.0, "b": 10 * 3 * 1.5})


def test_drawn_lengths_give_their_mean_cost() -> None:
    lengths = TenantWorkload("a", np.array([10, 90]), np.array([1, 1]), 1)
    plan = Phase(("a",), PLAN)
    estimate = estimated_gpu_seconds((plan,), {"a": 1000}, Workload((lengths,)), CANDIDATES, PlannerConfig(seed=1))
    assert estimate["a"] == pytest.approx(1000 * 3 * (0.5 + 0.01 * 50), rel=0.35)  # eight draws of 0.6 or 1.4 s
