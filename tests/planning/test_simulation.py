"""Length models against the paper's moments, and simulated rows against hand-made ones."""

from dataclasses import replace

import numpy as np
import pytest

from planning.baselines import DispatchRule, assign_by_length, assign_uniformly, power_of_two_uppers
from planning.candidates import Candidates
from planning.config import Batching, BucketRule, PlannerConfig, Strategy
from planning.length_models import LengthFamily, dataset_names, length_model, modelled_tenant
from planning.simulation import BASELINE, Scenario, Variant, cheapest_gpu_seconds, drawn_steps, simulate
from planning.types import Candidate, ParallelConfig, ReplicaGroup, replicas_of
from planning.workload import TenantWorkload, Workload

TWO = Workload(
    (
        TenantWorkload("a", np.array([3, 5, 9]), np.array([4, 3, 1]), 24),
        TenantWorkload("b", np.array([8, 20]), np.array([5, 3]), 6),
    )
)


@pytest.fixture
def scenario(small_candidates: Candidates) -> Scenario:
    return Scenario(TWO, small_candidates, 8, PlannerConfig(num_evaluation_batches=4))


@pytest.mark.parametrize("family", LengthFamily)
@pytest.mark.parametrize("dataset", dataset_names())
def test_models_have_the_means_of_table_4(dataset: str, family: LengthFamily) -> None:
    lengths = length_model(dataset, family).draw(np.random.default_rng(1), 200_000)
    mean = length_model(dataset, LengthFamily.SINGLE).mean_tokens
    # the fits reach the means within 1 %; clipping the single lognormal takes up to 4 % of its heavy tail
    assert lengths.mean() == pytest.approx(mean, rel=0.05)
    assert (lengths.min(), lengths.max() <= length_model(dataset, family).max_tokens) >= (16, True)


def test_modelled_tenants_repeat_with_their_seed() -> None:
    model = length_model("XSum", LengthFamily.GAMMA)
    first, second = (modelled_tenant("x", model, 4, seed=3) for _ in range(2))
    assert (first.lengths == second.lengths).all()
    assert first.counts.sum() == 20_000


def test_powers_of_two_end_at_the_context() -> None:
    assert power_of_two_uppers(16384, 7, 16384) == (256, 512, 1024, 2048, 4096, 8192, 16384)
    assert power_of_two_uppers(9000, 3, 20000) == (4096, 8192, 16384)
    assert power_of_two_uppers(9000, 3, 10000) == (4096, 8192, 10000)  # no replica holds 16,384 tokens


def test_baselines_never_pad_beyond_what_their_replicas_hold(planner: PlannerConfig) -> None:
    # 33 tokens would be padded to 64, and the only configuration holds 40
    only = Candidates((Candidate(ParallelConfig(1, 1), 40, 0.4, 0.1, 0.0),))
    workload = Workload((TenantWorkload("a", np.array([5, 33]), np.array([3, 1]), 8),))
    row = simulate(BASELINE, Scenario(workload, only, 2, planner), 3)
    assert row.bound_gpu_seconds <= row.gpu_seconds * (1 + 1e-9)


def test_uniform_dispatch_deals_sequences_in_turn(small_candidates: Candidates) -> None:
    replicas = replicas_of((ReplicaGroup(ParallelConfig(4, 1), 2),))
    load = assign_uniformly(replicas, small_candidates.by_config, np.array([4, 16]), np.array([3, 9, 4, 16, 2]))
    assert load.num_sequences.tolist() == [[3, 0], [0, 2]]


def test_length_based_dispatch_looks_at_cost_alone(small_candidates: Candidates) -> None:
    replicas = replicas_of((ReplicaGroup(ParallelConfig(4, 1), 1), ReplicaGroup(ParallelConfig(1, 1), 2)))
    load = assign_by_length(replicas, small_candidates.by_config, np.array([4, 20]), np.array([40, 2]))
    assert load.num_sequences[0].tolist() == [0, 2]  # 20 tokens fit on <4,1> alone
    assert load.num_sequences[1:, 0].sum() == 40  # 4 tokens cost 0.14 GPU seconds more on <4,1>
    assert load.num_sequences[1:, 0].tolist() == [20, 20]


def test_all_strategies_see_the_same_steps() -> None:
    together = drawn_steps(TWO, 5, 3)
    alone = drawn_steps(Workload((TWO.tenants[1],)), 5, 3)
    for joint, own in zip(together, alone, strict=True):
        assert joint[24:].tolist() == own.tolist()


def test_packed_chunks_and_more_buckets_never_cost_more(scenario: Scenario) -> None:
    groups = (ReplicaGroup(ParallelConfig(4, 1), 1), ReplicaGroup(ParallelConfig(1, 1), 4))
    lobra = Variant(Strategy.LOBRA, groups=groups)
    rows = [simulate(replace(lobra, num_buckets=number), scenario, 5) for number in (1, 2, 5)]
    packed = simulate(replace(lobra, batching=Batching.PACKED), scenario, 5)
    cost = [row.gpu_seconds for row in rows]
    assert cost == sorted(cost, reverse=True)
    assert packed.gpu_seconds <= cost[-1] * 1.02
    assert (packed.padding_ratio, rows[2].padding_ratio) == (0, 0)  # five unique lengths in five buckets
    for row in [*rows, packed]:
        assert row.bound_gpu_seconds <= row.gpu_seconds * (1 + 1e-9)
        assert row.gpu_seconds >= (cheapest_gpu_seconds(scenario) or 0) * 0.9  # the mean of five batches


def test_a_sequential_strategy_adds_up_its_tenants(scenario: Scenario) -> None:
    whole = simulate(replace(BASELINE, strategy=Strategy.TASK_SEQUENTIAL), scenario, 3)
    parts = [
        simulate(BASELINE, replace(scenario, workload=Workload((tenant,))), 3).gpu_seconds for tenant in TWO.tenants
    ]
    assert whole.gpu_seconds == pytest.approx(sum(parts))
    assert whole.plan.count(";") == 1


def test_names_tell_ablations_and_baselines_apart() -> None:
    ablation = Variant(Strategy.LOBRA, bucket_rule=BucketRule.FIXED, num_buckets=7, dispatch=DispatchRule.LENGTH_BASED)
    assert (ablation.name, ablation.buckets) == ("lobra/length_based", "fixed 7")
    assert (BASELINE.name, BASELINE.buckets) == ("task_fused", "fixed 7, uniform")
    assert Variant(Strategy.LOBRA, Batching.PACKED).buckets == "-"


def test_what_no_configuration_holds_has_no_cheapest_cost(scenario: Scenario) -> None:
    short = Candidates(tuple(c for c in scenario.candidates.usable if c.max_chunk_tokens < 20))
    assert cheapest_gpu_seconds(replace(scenario, candidates=short)) is None
