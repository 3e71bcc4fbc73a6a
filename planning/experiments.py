"""The paper's experiments on top of `simulation`: sweeps, planner time (Table 5), two stages against the joint optimum
(Fig. 10). Simulated seconds, except the planner's own, which are measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planning.config import Batching, Strategy
from planning.deployment import plan_deployment
from planning.dispatch import Dispatcher
from planning.simulation import (
    BASELINE,
    PACKED_BASELINE,
    Scenario,
    SimulatedRow,
    Variant,
    ablation_variants,
    drawn_steps,
    simulate,
    variants_of,
)
from planning.types import DeploymentPlan, ReplicaGroup, plan_name
from planning.workload import TenantWorkload, Workload

SHOWN_ORDER = (Strategy.TASK_FUSED, Strategy.TASK_SEQUENTIAL, Strategy.LOBRA_SEQUENTIAL, Strategy.LOBRA)
FUSED_AND_LOBRA = tuple(
    Variant(strategy, batching) for strategy in (Strategy.TASK_FUSED, Strategy.LOBRA) for batching in Batching
)


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A simulated row, its place in the sweep, and its reductions (fractions) against both `task_fused` baselines."""

    row: SimulatedRow
    num_gpus: int
    num_tenants: int
    reduction: float
    reduction_against_packed: float


@dataclass(frozen=True, slots=True)
class TwoStageStep:
    """One step on the deployment made beforehand, and on the best deployment for this very step."""

    step: int
    two_stage_seconds: float
    joint_seconds: float
    joint_plan: str


def compare(
    strategies: Sequence[Strategy], scenario: Scenario, groups: tuple[ReplicaGroup, ...], num_steps: int
) -> list[ComparedRow]:
    """Every variant of the strategies, with both baselines as the first rows."""
    ordered = sorted(set(strategies), key=SHOWN_ORDER.index)
    variants = [variant for strategy in ordered for variant in variants_of(strategy, groups)]
    return _compared(variants, scenario, num_steps)


def ablate(scenario: Scenario, groups: tuple[ReplicaGroup, ...], num_steps: int) -> list[ComparedRow]:
    """From length-based dispatch on fixed buckets to packed LobRA, on one set of replicas."""
    return _compared(ablation_variants(groups), scenario, num_steps)


def sweep_buckets(
    scenario: Scenario, groups: tuple[ReplicaGroup, ...], numbers: Sequence[int], num_steps: int
) -> list[ComparedRow]:
    """LobRA with so many dynamic buckets, on one set of replicas."""
    lobra = Variant(Strategy.LOBRA, groups=groups)
    return _compared([replace(lobra, num_buckets=number) for number in numbers], scenario, num_steps)


def sweep_gpus(scenario: Scenario, numbers: Sequence[int], num_steps: int) -> list[ComparedRow]:
    """Both batchings of LobRA and of task_fused on so many GPUs."""
    return [
        row for number in numbers for row in _compared(FUSED_AND_LOBRA, replace(scenario, num_gpus=number), num_steps)
    ]


def sweep_tenants(scenario: Scenario, numbers: Sequence[int], num_steps: int) -> list[ComparedRow]:
    """The same with the first so many tenants."""
    rows = []
    for number in numbers:
        part = Workload(scenario.workload.tenants[:number])
        rows += _compared(FUSED_AND_LOBRA, replace(scenario, workload=part), num_steps)
    return rows


def planner_times(scenario: Scenario, numbers: Sequence[int]) -> list[DeploymentPlan]:
    """The plan on so many GPUs; each carries its solve seconds, bound and gap."""
    return [plan_deployment(scenario.workload, scenario.candidates, number, scenario.planner) for number in numbers]


def two_stage(scenario: Scenario, num_steps: int) -> list[TwoStageStep]:
    """Steps on the plan for the expected batch, and on a plan for each step alone, as if replicas moved at no cost."""
    planned = plan_deployment(scenario.workload, scenario.candidates, scenario.num_gpus, scenario.planner)
    moves, buckets = scenario.planner.max_search_moves, scenario.planner.num_buckets
    fixed = Dispatcher(planned.replicas, scenario.candidates.by_config, buckets, moves)
    single = scenario.planner.model_copy(update={"num_evaluation_batches": 1})
    steps = []
    for number, drawn in enumerate(drawn_steps(scenario.workload, scenario.planner.seed + 1, num_steps)):
        load, _ = fixed.assign(fixed.buckets_of(drawn))
        seconds = float(load.replica_seconds().max())
        joint = plan_deployment(_exactly(drawn), scenario.candidates, scenario.num_gpus, single, planned.groups)
        steps.append(TwoStageStep(number, seconds, joint.predicted_step_seconds, plan_name(joint.groups)))
    return steps


def _compared(variants: Sequence[Variant], scenario: Scenario, num_steps: int) -> list[ComparedRow]:
    wanted = list(dict.fromkeys([BASELINE, PACKED_BASELINE, *variants]))
    rows = [simulate(variant, scenario, num_steps) for variant in wanted]
    padded, packed = rows[0].gpu_seconds, rows[1].gpu_seconds
    return [
        ComparedRow(
            row=row,
            num_gpus=scenario.num_gpus,
            num_tenants=len(scenario.workload.tenants),
            reduction=1 - row.gpu_seconds / padded,
            reduction_against_packed=1 - row.gpu_seconds / packed,
        )
        for row in rows
    ]


def _exactly(drawn: np.ndarray) -> Workload:
    """A workload whose every batch is this one: one tenant per length, which draws it always."""
    lengths, counts = np.unique(drawn, return_counts=True)
    one = np.array([1])
    return Workload(
        tuple(
            TenantWorkload(str(length), np.array([length]), one, int(count))
            for length, count in zip(lengths.tolist(), counts.tolist(), strict=True)
        )
    )
