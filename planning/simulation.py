"""What would a strategy cost? Steps drawn from the tenants' lengths, planned and dispatched as in training, timed by
the cost model. All strategies see the same steps. Nothing here is measured: every second is a simulated one.

A row is a strategy under one batching and one bucket rule. Reduction is against `task_fused`: equal replicas, seven
fixed buckets, padded, uniform dispatch, as the paper compares; and, beside it, against packed `task_fused`, so that a
gain from packing alone cannot pass for one from unequal replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planning.assignment import Load
from planning.baselines import DispatchRule, assign_by_length, assign_uniformly, fitted_uppers, power_of_two_uppers
from planning.candidates import Candidates
from planning.config import Batching, BucketRule, PlannerConfig, Strategy
from planning.deployment import plan_deployment
from planning.dispatch import BucketCounts, Dispatcher, bucket_counts
from planning.metrics import imbalance
from planning.shares import cost_table
from planning.types import ReplicaGroup, plan_name, replicas_of
from planning.workload import Workload

NUM_BASELINE_BUCKETS = 7
FITTED_BUCKETS = 10  # from so many fixed buckets on, powers of two would leave the short ones empty


@dataclass(frozen=True, slots=True)
class Variant:
    """A strategy as it is simulated. `groups` fixes the replicas; empty: the planner chooses."""

    strategy: Strategy
    batching: Batching = Batching.PADDED
    bucket_rule: BucketRule = BucketRule.DYNAMIC
    num_buckets: int = 16
    dispatch: DispatchRule = DispatchRule.BALANCED
    groups: tuple[ReplicaGroup, ...] = ()

    @property
    def name(self) -> str:
        """The strategy; an ablation carries its dispatch rule."""
        ablation = self.dispatch is not DispatchRule.BALANCED and not self.strategy.is_homogeneous
        return f"{self.strategy}/{self.dispatch}" if ablation else self.strategy.value

    @property
    def buckets(self) -> str:
        if self.batching is Batching.PACKED:
            return "-"
        rule = f"{self.bucket_rule} {self.num_buckets}"
        return f"{rule}, {self.dispatch}" if self.dispatch is DispatchRule.UNIFORM else rule


@dataclass(frozen=True, slots=True)
class SimulatedRow:
    """Means over the steps; `bound_gpu_seconds` from the steps' linear programs, for these replicas and buckets."""

    variant: Variant
    plan: str
    gpu_seconds: float
    padding_ratio: float
    imbalance: float
    bound_gpu_seconds: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """Tenants, configurations and GPUs of a simulation."""

    workload: Workload
    candidates: Candidates
    num_gpus: int
    planner: PlannerConfig


@dataclass(slots=True)
class _Totals:
    """Sums over the steps of one phase."""

    step_seconds: float = 0.0
    bound_seconds: float = 0.0
    imbalance: float = 0.0
    computed_tokens: float = 0.0
    real_tokens: float = 0.0


BASELINE = Variant(Strategy.TASK_FUSED, Batching.PADDED, BucketRule.FIXED, NUM_BASELINE_BUCKETS, DispatchRule.UNIFORM)
PACKED_BASELINE = Variant(Strategy.TASK_FUSED, Batching.PACKED)


def variants_of(strategy: Strategy, groups: tuple[ReplicaGroup, ...] = ()) -> list[Variant]:
    """What is shown of a strategy: padded and packed, on given replicas (if any) and on the planner's own."""
    if strategy is Strategy.TASK_FUSED:
        balanced = replace(BASELINE, dispatch=DispatchRule.BALANCED)
        return [BASELINE, balanced, Variant(strategy), PACKED_BASELINE]
    if strategy is Strategy.TASK_SEQUENTIAL:
        return [replace(BASELINE, strategy=strategy), Variant(strategy), Variant(strategy, Batching.PACKED)]
    own = [Variant(strategy), Variant(strategy, Batching.PACKED)]
    given = [replace(variant, groups=groups) for variant in own] if groups and not strategy.is_sequential else []
    return [*given, *own]


def ablation_variants(groups: tuple[ReplicaGroup, ...]) -> list[Variant]:
    """The steps from length-based dispatch to the full system (paper, Fig. 8), on one set of replicas."""
    lobra = Variant(Strategy.LOBRA, groups=groups)
    fixed = replace(lobra, bucket_rule=BucketRule.FIXED)
    return [
        replace(fixed, num_buckets=NUM_BASELINE_BUCKETS, dispatch=DispatchRule.LENGTH_BASED),
        replace(fixed, num_buckets=NUM_BASELINE_BUCKETS),
        fixed,
        lobra,
        replace(lobra, num_buckets=32),
        replace(lobra, batching=Batching.PACKED),
    ]


def simulate(variant: Variant, scenario: Scenario, num_steps: int) -> SimulatedRow:
    """Simulate `num_steps` steps. Raises PlanInfeasibleError as planning does."""
    parts = (
        [Workload((tenant,)) for tenant in scenario.workload.tenants]
        if variant.strategy.is_sequential
        else [scenario.workload]
    )
    names, total = [], _Totals()
    for part in parts:
        groups = variant.groups or _planned(variant, replace(scenario, workload=part))
        names.append(plan_name(groups))
        _simulate_phase(variant, replace(scenario, workload=part), groups, num_steps, total)
    return SimulatedRow(
        variant=variant,
        plan="; ".join(names),
        gpu_seconds=scenario.num_gpus * total.step_seconds / num_steps,
        padding_ratio=1.0 - total.real_tokens / total.computed_tokens,
        imbalance=total.imbalance / num_steps / len(parts),
        bound_gpu_seconds=scenario.num_gpus * total.bound_seconds / num_steps,
    )


def cheapest_gpu_seconds(scenario: Scenario, max_pp: int | None = None) -> float | None:
    """GPU seconds per step if each sequence ran on its cheapest configuration, without padding, perfectly balanced.

    None where some sequence fits on no configuration of at most `max_pp` stages.
    """
    usable = [c for c in scenario.candidates.usable if max_pp is None or c.config.pp <= max_pp]
    lengths, counts = scenario.workload.expected_counts()
    table = cost_table(usable, lengths, Batching.PACKED)
    gpu_seconds = float((table.num_gpus[:, None] * table.least_seconds).min(axis=0, initial=np.inf) @ counts)
    return gpu_seconds if np.isfinite(gpu_seconds) else None


def drawn_steps(workload: Workload, seed: int, num_steps: int) -> list[np.ndarray]:
    """The lengths of each step in the order drawn; a tenant's are the same in every workload that has it."""
    alone = [Workload((tenant,)) for tenant in workload.tenants]
    generators = [np.random.default_rng([seed, *tenant.name.encode()]) for tenant in workload.tenants]
    return [
        np.concatenate([own.sample_lengths(rng)[0] for own, rng in zip(alone, generators, strict=True)])
        for _ in range(num_steps)
    ]


def _planned(variant: Variant, scenario: Scenario) -> tuple[ReplicaGroup, ...]:
    planner = scenario.planner.model_copy(
        update={
            "strategy": variant.strategy,
            "batching": variant.batching,
            "bucket_rule": variant.bucket_rule,
            "num_buckets": variant.num_buckets,
        }
    )
    return plan_deployment(scenario.workload, scenario.candidates, scenario.num_gpus, planner).groups


def _fixed_uppers(variant: Variant, workload: Workload, largest_chunk_tokens: int) -> tuple[int, ...]:
    if variant.bucket_rule is BucketRule.DYNAMIC or variant.batching is Batching.PACKED:
        return ()
    if variant.num_buckets >= FITTED_BUCKETS:
        return fitted_uppers(*workload.expected_counts(), variant.num_buckets)
    return power_of_two_uppers(workload.longest_tokens, variant.num_buckets, largest_chunk_tokens)


def _simulate_phase(
    variant: Variant, scenario: Scenario, groups: Sequence[ReplicaGroup], num_steps: int, total: _Totals
) -> None:
    replicas, by_config = replicas_of(tuple(groups)), scenario.candidates.by_config
    largest_chunk_tokens = max(by_config[group.config].max_chunk_tokens for group in groups)
    uppers = _fixed_uppers(variant, scenario.workload, largest_chunk_tokens)
    dispatcher = Dispatcher(
        replicas, by_config, variant.num_buckets, scenario.planner.max_search_moves, variant.batching, uppers
    )
    for drawn in drawn_steps(scenario.workload, scenario.planner.seed + 1, num_steps):
        if variant.batching is Batching.PACKED:
            packed, bound = dispatcher.pack(np.sort(drawn))
            _add(total, packed.replica_seconds(), bound, float(drawn.sum()), drawn)
            continue
        batch = bucket_counts(drawn, variant.num_buckets, uppers)
        balanced, bound = dispatcher.assign(batch)
        match variant.dispatch:
            case DispatchRule.BALANCED:
                load: Load = balanced
            case DispatchRule.LENGTH_BASED:
                load = assign_by_length(replicas, by_config, batch.uppers, batch.counts)
            case DispatchRule.UNIFORM:
                load = assign_uniformly(replicas, by_config, batch.uppers, drawn)
        _add(total, load.replica_seconds(), bound, _padded_tokens(batch), drawn)


def _add(total: _Totals, seconds: np.ndarray, bound: float, computed_tokens: float, drawn: np.ndarray) -> None:
    total.step_seconds += float(seconds.max())
    total.bound_seconds += bound
    total.imbalance += imbalance(seconds.tolist())
    total.computed_tokens += computed_tokens
    total.real_tokens += float(drawn.sum())


def _padded_tokens(batch: BucketCounts) -> float:
    return float(batch.uppers @ batch.counts)
