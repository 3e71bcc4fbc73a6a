"""What each strategy trains on which plan."""

import numpy as np
import pytest

from planning.candidates import Candidates
from planning.config import Batching, BucketRule, PlannerConfig, Strategy
from planning.dispatch import dispatcher_for
from planning.step_plan import check_plan, step_plan_from
from planning.strategies import strategy_phases
from planning.types import ReplicaGroup
from planning.workload import TenantWorkload, Workload

WORKLOAD = Workload(
    (
        TenantWorkload("short", np.array([3, 5, 9]), np.array([4, 3, 1]), 24),
        TenantWorkload("long", np.array([8, 20, 40]), np.array([5, 3, 1]), 6),
    )
)


@pytest.mark.parametrize("batching", Batching)
@pytest.mark.parametrize("strategy", Strategy)
def test_every_strategy_trains_every_tenant_once_on_plans_that_hold_its_sequences(
    strategy: Strategy, batching: Batching, small_candidates: Candidates
) -> None:
    planner = PlannerConfig(strategy=strategy, batching=batching, num_evaluation_batches=8)
    phases = strategy_phases(WORKLOAD, small_candidates, 8, planner)
    assert [name for phase in phases for name in phase.tenants] == ["short", "long"]
    assert len(phases) == (2 if strategy.is_sequential else 1)
    for phase in phases:
        if strategy.is_homogeneous:
            assert len(phase.plan.groups) == 1
        own = Workload(tuple(tenant for tenant in WORKLOAD.tenants if tenant.name in phase.tenants))
        sequences = own.sample_step(np.random.default_rng(5))
        dispatch = dispatcher_for(phase.plan, small_candidates.by_config, planner).dispatch(sequences)
        check_plan(step_plan_from(0, dispatch, {}), sequences, phase.plan.replicas, small_candidates.by_config)
        assert (dispatch.padding_ratio == 0) or batching is Batching.PADDED


def test_a_homogeneous_plan_uses_all_room_of_its_configuration(small_candidates: Candidates) -> None:
    planner = PlannerConfig(strategy=Strategy.TASK_FUSED, num_evaluation_batches=8)
    plan = strategy_phases(WORKLOAD, small_candidates, 9, planner)[0].plan
    assert plan.groups == (ReplicaGroup(plan.groups[0].config, 9 // plan.groups[0].config.num_gpus),)


def test_unequal_replicas_are_never_slower_than_equal_ones(small_candidates: Candidates) -> None:
    def seconds(strategy: Strategy) -> float:
        planner = PlannerConfig(strategy=strategy, num_evaluation_batches=8)
        return strategy_phases(WORKLOAD, small_candidates, 8, planner)[0].plan.predicted_step_seconds

    assert seconds(Strategy.LOBRA) <= seconds(Strategy.TASK_FUSED) * (1 + 1e-9)


def test_fixed_buckets_stay_in_the_plan_and_in_the_dispatch(small_candidates: Candidates) -> None:
    planner = PlannerConfig(bucket_rule=BucketRule.FIXED, num_buckets=3, num_evaluation_batches=8)
    plan = strategy_phases(WORKLOAD, small_candidates, 8, planner)[0].plan
    assert len(plan.bucket_uppers) == 3
    assert plan.bucket_uppers[-1] == 40
    dispatcher = dispatcher_for(plan, small_candidates.by_config, planner)
    for seed in range(5):
        dispatch = dispatcher.dispatch(WORKLOAD.sample_step(np.random.default_rng(seed)))
        assert {bucket.upper_tokens for bucket in dispatch.buckets} <= set(plan.bucket_uppers)
