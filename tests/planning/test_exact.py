"""The fast search against the exact MINLP, and the exact MINLP against brute force."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from planning.candidates import Candidates
from planning.config import PlannerConfig
from planning.deployment import plan_deployment
from planning.dispatch import BucketCounts
from planning.exact import exact_deployment
from planning.plan_ranking import sample_batches
from planning.types import Candidate, ParallelConfig
from planning.workload import TenantWorkload, Workload


def brute_force(batch: BucketCounts, candidates: Sequence[Candidate], max_gpus: int) -> float:
    """Shortest makespan over all plans and all ways to spread the sequences, each replica with its best chunks."""

    def alone(candidate: Candidate, counts: tuple[int, ...]) -> float:
        best = np.inf
        limits = [
            range(1, min(n, candidate.max_chunk_tokens // s) + 1) if n else (0,)
            for n, s in zip(counts, batch.uppers.tolist(), strict=True)
        ]
        for sizes in itertools.product(*limits):
            total, largest = 0.0, 0.0
            for n, q, s in zip(counts, sizes, batch.uppers.tolist(), strict=True):
                if n:
                    chunks = -(-n // q)
                    total += chunks * candidate.chunk_seconds(0, s) + n * candidate.sequence_seconds(s)
                    largest = max(largest, candidate.chunk_seconds(-(-n // chunks), s))
            best = min(best, total + (candidate.config.pp - 1) * largest)
        return best

    best = np.inf
    for size in range(1, max_gpus + 1):
        for plan in itertools.combinations_with_replacement(candidates, size):
            if sum(candidate.config.num_gpus for candidate in plan) > max_gpus:
                continue
            spreads = [
                [s for s in itertools.product(range(n + 1), repeat=size) if sum(s) == n] for n in batch.counts.tolist()
            ]
            for choice in itertools.product(*spreads):
                own = [tuple(spread[r] for spread in choice) for r in range(size)]
                best = min(best, max(alone(candidate, counts) for candidate, counts in zip(plan, own, strict=True)))
    return best


@pytest.mark.parametrize("counts", [(3, 1), (1, 2), (4, 0)])
def test_the_exact_program_finds_what_brute_force_finds(counts: tuple[int, int], small_candidates: Candidates) -> None:
    batch = BucketCounts(np.array([6, 14])[np.array(counts) > 0], np.array([n for n in counts if n]))
    usable = small_candidates.usable[:3]
    exact = exact_deployment([batch], usable, 3, 60.0)
    assert exact.is_optimal
    assert exact.step_seconds == pytest.approx(brute_force(batch, usable, 3), rel=1e-6)


def test_the_exact_program_keeps_the_optimum_that_a_bilinear_one_loses() -> None:
    usable = (
        Candidate(ParallelConfig(1, 2), 42, 0.26, 0.06, 0.0009),
        Candidate(ParallelConfig(1, 4), 65, 0.12, 0.02, 0.0005),
        Candidate(ParallelConfig(2, 2), 57, 0.23, 0.03, 0.0005),
        Candidate(ParallelConfig(4, 1), 73, 0.50, 0.036, 0.0007),
    )
    batch = BucketCounts(np.array([31, 39]), np.array([8, 5]))
    exact = exact_deployment([batch], usable, 4, 60.0)
    alone = {candidate.config: exact_deployment([batch], [candidate], 4, 60.0) for candidate in usable}
    assert exact.is_optimal
    assert exact.step_seconds <= min(each.step_seconds for each in alone.values()) * (1 + 1e-6)


@pytest.mark.parametrize("num_gpus", [2, 4, 6])
def test_the_fast_search_is_within_half_a_per_cent_of_the_exact_program(
    num_gpus: int, small_candidates: Candidates
) -> None:
    # one batch, always the same: what the search ranks is what the program minimises
    one = np.array([1])
    tenants = [("a", 5, 7), ("b", 12, 5), ("c", 16, 2)]
    workload = Workload(tuple(TenantWorkload(name, np.array([length]), one, n) for name, length, n in tenants))
    planner = PlannerConfig(num_evaluation_batches=1)
    pool = Candidates(tuple(c for c in small_candidates.usable if c.config.pp == 1))
    plan = plan_deployment(workload, pool, num_gpus, planner)
    buckets = sample_batches(workload, planner)[0].buckets
    assert buckets is not None
    usable = [candidate for candidate in pool.usable if candidate.config.num_gpus <= num_gpus]
    exact = exact_deployment([buckets], usable, num_gpus, 60.0)
    assert exact.is_optimal
    assert plan.lower_bound_seconds <= exact.step_seconds * (1 + 1e-6)
    assert exact.step_seconds * (1 - 1e-6) <= plan.predicted_step_seconds <= exact.step_seconds * 1.005
