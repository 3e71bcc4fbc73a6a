"""The figures of the planning engine: `pytest tests/benchmarks/test_planning.py -m "" -s`.

Quality is asserted always, time on a quiet machine only. Lengths are the shipped models; profiles the shipped presets.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import csr_array, hstack

from planning.baselines import DispatchRule
from planning.bucketing import choose_uppers
from planning.candidates import Candidates, candidates_of_profile
from planning.config import Batching, BucketRule, PlannerConfig, Strategy
from planning.deployment import plan_deployment
from planning.dispatch import BucketCounts, Dispatcher
from planning.exact import exact_deployment
from planning.length_models import LengthFamily, dataset_names, length_model, modelled_tenant
from planning.plan_ranking import sample_batches
from planning.profile import read_preset
from planning.shares import cost_table
from planning.simulation import (
    BASELINE,
    PACKED_BASELINE,
    Scenario,
    Variant,
    ablation_variants,
    cheapest_gpu_seconds,
    drawn_steps,
    simulate,
)
from planning.types import Candidate, ParallelConfig, Replica, ReplicaGroup, plan_name, replicas_of
from planning.workload import TenantWorkload, Workload

pytestmark = pytest.mark.slow

SEVEN_B = (
    "databricks-dolly-15k",
    "Evol-Instruct",
    "XSum",
    "CommitPackFt",
    "MeetingBank",
    "python_code_instructions",
)
FOUR = ("Evol-Instruct", "CommitPackFt", "BillSum", "PubMedQA")
FIVE_CONFIGURATIONS = ("<16,1>", "<8,1>", "<4,1>", "<4,2>", "<2,4>")
NUM_STEPS = 100
Timed = Callable[[list[Callable[[], object]]], object]
Interleaved = Callable[..., dict]


def workload(names: tuple[str, ...], family: LengthFamily = LengthFamily.GAMMA) -> Workload:
    models = [length_model(name, family) for name in names]
    return Workload(
        tuple(
            modelled_tenant(name, model, model.batch_size, seed)
            for seed, (name, model) in enumerate(zip(names, models, strict=True))
        )
    )


def groups(*parts: tuple[int, int, int]) -> tuple[ReplicaGroup, ...]:
    return tuple(ReplicaGroup(ParallelConfig(tp, pp), count) for tp, pp, count in parts)


PAPER_PLAN = groups((8, 1, 1), (2, 1, 1), (1, 1, 6))


def candidates(preset: str, num_gpus: int) -> Candidates:
    return candidates_of_profile(read_preset(preset), num_gpus, PlannerConfig())


SEVENTY_B = "synthetic_70b_like"
LLAMA = "llama2_7b_a100_40gb"


@pytest.mark.parametrize(
    ("num_gpus", "limit_seconds", "max_gap"), [(16, 0.5, 0.03), (64, 2.0, 0.03), (256, 3.0, 0.07), (1024, 5.0, None)]
)
def test_deployment_is_fast_and_close_to_its_bound(
    num_gpus: int, limit_seconds: float, max_gap: float | None, interleaved: Interleaved, is_quiet: bool
) -> None:
    preset, names = (LLAMA, SEVEN_B) if num_gpus == 16 else (SEVENTY_B, dataset_names())
    tenants, pool = workload(names), candidates(preset, num_gpus)
    planners = {str(rule): PlannerConfig(bucket_rule=rule) for rule in (BucketRule.DYNAMIC, BucketRule.FIXED)}
    planners["packed"] = PlannerConfig(batching=Batching.PACKED)
    plans = {name: plan_deployment(tenants, pool, num_gpus, planner) for name, planner in planners.items()}
    timings = interleaved(
        {name: partial(plan_deployment, tenants, pool, num_gpus, planner) for name, planner in planners.items()}
    )
    print(f"\ndeployment, {num_gpus} GPUs, {len(names)} tenants")
    for name, plan in plans.items():
        print(f"  {name:7} {timings[name]}; {plan} {plan.predicted_step_seconds:.3f} s, gap {plan.gap:.2%}")
        assert plan.lower_bound_seconds <= plan.predicted_step_seconds
    # the gap's limit is defined on fixed buckets and 32 seeded batches
    assert max_gap is None or plans[str(BucketRule.FIXED)].gap <= max_gap
    assert not is_quiet or timings[str(BucketRule.DYNAMIC)].median_ms <= 1e3 * limit_seconds


def test_a_fresh_process_plans_within_seconds() -> None:
    script = "from planning.deployment import plan_deployment\nimport time\nprint(time.process_time())"
    taken = [
        float(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout) for _ in range(7)
    ]
    print(
        f"\nimport of the planner in a fresh process: {np.median(taken):.2f} CPU s ({min(taken):.2f}-{max(taken):.2f})"
    )
    assert np.median(taken) < 5


@pytest.mark.parametrize(
    ("num_gpus", "given"),
    [
        (48, groups((2, 4, 2), (4, 2, 1), (8, 1, 1), (16, 1, 1))),
        (64, groups((2, 4, 3), (4, 2, 1), (8, 1, 2), (16, 1, 1))),
        (128, ()),
    ],
)
def test_plans_of_four_tenants_are_never_slower_than_the_published_codes(
    num_gpus: int, given: tuple[ReplicaGroup, ...]
) -> None:
    tenants, every = workload(FOUR), candidates(SEVENTY_B, num_gpus)
    pool = Candidates(tuple(c for c in every.usable if str(c.config) in FIVE_CONFIGURATIONS))
    plan = plan_deployment(tenants, pool, num_gpus, PlannerConfig(), given)
    print(f"\n{num_gpus} GPUs, four tenants: {plan} {plan.predicted_step_seconds:.3f} s, gap {plan.gap:.2%}")
    if given:
        # the same integer evaluation for both; 100 fresh steps cannot tell plans apart that differ by 0.3 %
        steps = [np.sort(drawn) for drawn in drawn_steps(tenants, 3, NUM_STEPS)]
        makespans = [mean_makespan(replicas_of(each), pool, steps, Batching.PADDED)[0] for each in (plan.groups, given)]
        print(f"  {NUM_STEPS} fresh steps: {makespans[0]:.3f} s; {plan_name(given)} {makespans[1]:.3f} s")
        assert makespans[0] <= makespans[1] * 1.003


def program_seconds(replicas: tuple[Replica, ...], pool: Candidates, batch: BucketCounts) -> float:
    """The linear program of full chunks in which every replica of depth pp idles pp - 1 of its largest full chunks.

    The usual yardstick of a dispatch; a replica whose largest chunk is not full beats it, so it is no lower bound.
    """
    configs = sorted({replica.config for replica in replicas})
    num_replicas = np.array([sum(replica.config == config for replica in replicas) for config in configs])
    table = cost_table([pool.by_config[config] for config in configs], batch.uppers)
    full = np.where(table.capacity > 0, table.fixed[:, None] + table.variable * table.capacity, 0.0)
    group, bucket = np.nonzero(table.capacity)
    seconds = (full / np.maximum(table.capacity, 1) * batch.counts)[group, bucket]
    parts = np.arange(len(group))
    work = csr_array((seconds, (group, parts)), shape=(len(configs), len(parts)))
    whole = csr_array((np.ones(len(parts)), (bucket, parts)), shape=(len(batch.counts), len(parts)))
    solved = linprog(
        np.append(np.zeros(len(parts)), 1.0),
        A_ub=hstack([work, -num_replicas[:, None]]),
        b_ub=-num_replicas * table.depth * full.max(axis=1),
        A_eq=hstack([whole, np.zeros((len(batch.counts), 1))]),
        b_eq=np.ones(len(batch.counts)),
    )
    return float(solved.fun)


def mean_makespan(
    replicas: tuple[Replica, ...], pool: Candidates, steps: list[np.ndarray], batching: Batching
) -> tuple[float, np.ndarray]:
    """Mean makespan (s), and each step's distance to its own bound."""
    dispatcher = Dispatcher(replicas, pool.by_config, 16, 2000, batching)
    makespans, bounds = [], []
    for lengths in steps:
        if batching is Batching.PACKED:
            packed, bound = dispatcher.pack(lengths)
            makespans.append(packed.replica_seconds().max())
        else:
            load, bound = dispatcher.assign(dispatcher.buckets_of(lengths))
            makespans.append(load.replica_seconds().max())
        bounds.append(bound)
    return float(np.mean(makespans)), np.array(makespans) / np.array(bounds) - 1


@dataclass(frozen=True)
class DispatchCase:
    """A plan (empty: the planner's own on 256 GPUs), and the limits: milliseconds, and the distance of a step to the
    program (padded) or the bound (packed), on average and at most."""

    batching: Batching
    preset: str
    groups: tuple[ReplicaGroup, ...]
    limit_ms: float
    mean_gap: float
    max_gap: float = np.inf

    @property
    def names(self) -> tuple[str, ...]:
        return SEVEN_B if self.preset == LLAMA else dataset_names()


SIXTY_FOUR = groups((16, 1, 1), (8, 1, 2), (4, 2, 1), (2, 4, 3))


@pytest.mark.parametrize(
    "case",
    [
        DispatchCase(Batching.PADDED, LLAMA, PAPER_PLAN, 5.0, 0.012, 0.02),
        DispatchCase(Batching.PACKED, LLAMA, PAPER_PLAN, 10.0, 0.015, 0.025),
        DispatchCase(Batching.PADDED, SEVENTY_B, SIXTY_FOUR, 10.0, 0.006),
        DispatchCase(Batching.PADDED, SEVENTY_B, (), 20.0, 0.006),
    ],
    ids=lambda case: f"{case.batching}-{case.preset}-{len(case.groups)}",
)
def test_dispatch_is_fast_and_close_to_its_linear_program(case: DispatchCase, timed: Timed, is_quiet: bool) -> None:
    tenants, pool = workload(case.names), candidates(case.preset, 256)
    replicas = replicas_of(case.groups or plan_deployment(tenants, pool, 256, PlannerConfig()).groups)
    steps = [np.sort(drawn) for drawn in drawn_steps(tenants, 7, NUM_STEPS)]
    dispatcher = Dispatcher(replicas, pool.by_config, 16, 2000, case.batching)
    if case.batching is Batching.PACKED:
        _, gaps = mean_makespan(replicas, pool, steps, case.batching)
        timing, to_bound = timed([partial(dispatcher.pack, lengths) for lengths in steps]), gaps
    else:
        batches = [dispatcher.buckets_of(lengths) for lengths in steps]
        found = [dispatcher.assign(batch) for batch in batches]
        makespans = np.array([load.replica_seconds().max() for load, _ in found])
        to_bound = makespans / np.array([bound for _, bound in found]) - 1
        gaps = makespans / np.array([program_seconds(replicas, pool, batch) for batch in batches]) - 1
        timing = timed([partial(lambda lengths: dispatcher.assign(dispatcher.buckets_of(lengths)), s) for s in steps])
    print(
        f"\n{case.batching} dispatch, {case.preset}, {len(replicas)} replicas, {len(steps[0])} sequences: {timing}; "
        f"above the program mean {gaps.mean():.2%}, max {gaps.max():.2%}; above the bound mean {to_bound.mean():.2%}, "
        f"max {to_bound.max():.2%}"
    )
    assert gaps.mean() <= case.mean_gap
    assert gaps.max() <= case.max_gap
    assert not is_quiet or timing.median_ms <= case.limit_ms


def test_exact_buckets_take_a_millisecond(timed: Timed, is_quiet: bool) -> None:
    unique = [np.unique(drawn, return_counts=True) for drawn in drawn_steps(workload(SEVEN_B), 7, NUM_STEPS)]
    timing = timed([partial(choose_uppers, lengths, counts, 16) for lengths, counts in unique])
    print(f"\n16 exact buckets of 832 sequences, {len(unique[0][0])} unique lengths: {timing}")
    assert not is_quiet or timing.median_ms <= 1.2  # 1 ms is wanted: see BENCHMARKS.md


def test_small_deployments_are_those_of_the_exact_program() -> None:
    rng, one, excess, solved = np.random.default_rng(3), np.array([1]), [], 0
    pool = (
        Candidate(ParallelConfig(1, 1), 16, 0.4, 0.10, 0.002),
        Candidate(ParallelConfig(2, 1), 32, 0.5, 0.06, 0.001),
        Candidate(ParallelConfig(4, 1), 64, 0.6, 0.04, 0.0005),
    )
    planner = PlannerConfig(num_evaluation_batches=1)
    for _ in range(20):
        num_gpus = int(rng.integers(2, 9))
        lengths = np.unique(rng.integers(2, 17, int(rng.integers(2, 5))))
        tenants = Workload(
            tuple(TenantWorkload(str(n), np.array([n]), one, int(rng.integers(1, 8))) for n in lengths.tolist())
        )
        plan = plan_deployment(tenants, Candidates(pool), num_gpus, planner)
        buckets = sample_batches(tenants, planner)[0].buckets
        assert buckets is not None
        usable = [candidate for candidate in pool if candidate.config.num_gpus <= num_gpus]
        exact = exact_deployment([buckets], usable, num_gpus, 20.0)
        assert plan.lower_bound_seconds <= exact.step_seconds * (1 + 1e-6)
        if exact.is_optimal:
            solved += 1
            excess.append(plan.predicted_step_seconds / exact.step_seconds - 1)
    within = sum(value <= 0.005 for value in excess)
    print(f"\nexact MINLP: {solved} of 20 solved; {within} within 0.5 %, worst {max(excess):.2%} above")
    assert within >= 0.9 * solved


@pytest.mark.parametrize("family", LengthFamily)
def test_simulated_reductions_of_the_7b_experiment(family: LengthFamily) -> None:
    scenario = Scenario(workload(SEVEN_B, family), candidates(LLAMA, 16), 16, PlannerConfig())
    own = [Variant(Strategy.LOBRA, batching) for batching in Batching]
    sequential = [replace(variant, strategy=Strategy.TASK_SEQUENTIAL) for variant in (BASELINE, PACKED_BASELINE)]
    balanced = replace(BASELINE, dispatch=DispatchRule.BALANCED)
    fused = [BASELINE, balanced, Variant(Strategy.TASK_FUSED), PACKED_BASELINE]
    variants = [*fused, *sequential, *ablation_variants(PAPER_PLAN), *own]
    rows = {variant: simulate(variant, scenario, NUM_STEPS) for variant in variants}
    base, packed_base = rows[BASELINE].gpu_seconds, rows[PACKED_BASELINE].gpu_seconds
    print(f"\n{family}: cheapest {cheapest_gpu_seconds(scenario, 1):.1f} (pp=1), {cheapest_gpu_seconds(scenario):.1f}")
    for variant, row in rows.items():
        saved_percent, against_packed = (100 * (1 - row.gpu_seconds / each) for each in (base, packed_base))
        print(
            f"  {variant.name:20} {variant.batching:7} {variant.buckets:18} {row.gpu_seconds:6.1f} GPU s "
            f"{saved_percent:6.1f} % {against_packed:6.1f} %  {row.plan}"
        )

    def saved(variant: Variant, against: float) -> float:
        return 100 * (1 - rows[variant].gpu_seconds / against)

    on_paper = [Variant(Strategy.LOBRA, batching, groups=PAPER_PLAN) for batching in Batching]
    assert saved(on_paper[0], base) >= (45 if family is LengthFamily.SINGLE else 46)
    assert saved(on_paper[1], base) >= (53.5 if family is LengthFamily.LOGNORMAL else 54)
    assert saved(own[1], base) >= 56
    assert saved(own[1], packed_base) >= 30
