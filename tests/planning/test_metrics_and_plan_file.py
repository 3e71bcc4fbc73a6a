"""Shares of the bill, imbalance, and the plan's JSON form."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from planning.candidates import Candidates
from planning.errors import InputError
from planning.metrics import imbalance, tenant_shares
from planning.plan_file import plan_from_dict, plan_to_dict
from planning.types import (
    Chunk,
    DeploymentPlan,
    ParallelConfig,
    PlanAlternative,
    PrunedConfig,
    Replica,
    ReplicaGroup,
    SequenceRef,
)

PLAN = DeploymentPlan(
    groups=(ReplicaGroup(ParallelConfig(2, 1), 1), ReplicaGroup(ParallelConfig(1, 1), 2)),
    num_gpus=5,
    predicted_step_seconds=2.0,
    lower_bound_seconds=1.6,
    solve_seconds=0.1,
    tenant_gpu_seconds={"a": 6.0, "b": 4.0},
    pruned=(PrunedConfig(ParallelConfig(4, 1), "does not fit"),),
    alternatives=(PlanAlternative((ReplicaGroup(ParallelConfig(1, 1), 5),), 2.5),),
)


def test_a_tenants_share_counts_every_gpu_that_ran_it(
    small_candidates: Candidates, replicas: Callable[..., tuple[Replica, ...]]
) -> None:
    a, b, c = (SequenceRef(tenant, 0, 8) for tenant in "abc")
    shares = tenant_shares(
        [[Chunk((b, c), 10)], [Chunk((a,), 8)]], replicas((2, 1, 1), (1, 1, 1)), small_candidates.by_config
    )
    on_two = 2 * (0.5 + 20 * 0.06 + 200 * 0.001) / 2  # GPUs x seconds / sequences
    alone = 0.4 + 8 * 0.1 + 64 * 0.002
    total = 2 * on_two + alone
    assert shares == pytest.approx({"a": alone / total, "b": on_two / total, "c": on_two / total})


def test_an_empty_step_has_no_shares(
    small_candidates: Candidates, replicas: Callable[..., tuple[Replica, ...]]
) -> None:
    assert tenant_shares([[]], replicas((1, 1, 1)), small_candidates.by_config) == {}


def test_imbalance_is_the_longest_over_the_mean() -> None:
    assert imbalance([3.0, 1.0, 2.0]) == pytest.approx(0.5)
    assert imbalance([0.0, 0.0]) == 0.0


def test_a_plan_survives_json_and_carries_the_bill() -> None:
    data = json.loads(json.dumps(plan_to_dict(PLAN)))
    assert plan_from_dict(data) == PLAN
    assert data["plan"] == [{"tp": 2, "pp": 1, "replicas": 1}, {"tp": 1, "pp": 1, "replicas": 2}]
    assert data["gpu_seconds_per_step"] == pytest.approx(sum(data["tenants"].values()))
    assert data["gap"] == pytest.approx(0.25)
    assert data["pruned"] == [{"tp": 4, "pp": 1, "reason": "does not fit"}]


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        ({"schema_version": 3}, "schema_version"),
        ({"plan": []}, "plan"),
        ({"plan": [{"tp": 0, "pp": 1, "replicas": 1}]}, "plan.0.tp"),
        ({"plan": [{"tp": 1, "pp": 1, "replicas": 9}]}, "uses? 9 GPUs"),
        ({"predicted_step_seconds": float("nan")}, "predicted_step_seconds"),
        ({"lower_bound_seconds": 0}, "lower_bound_seconds"),
        ({"tenants": {"a": "much"}}, "tenants.a"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_damaged_plan_file_is_refused_with_the_field(damage: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=field):
        plan_from_dict(plan_to_dict(PLAN) | damage)


def test_something_that_is_no_plan_is_refused() -> None:
    with pytest.raises(InputError, match="whole file"):
        plan_from_dict(["plan"])
