"""The fast search against the exact program on small random deployments.

`pytest tests/benchmarks/test_exact.py -m "" -s`; takes up to half an hour. One step, always the same, so that the
search ranks plans by just what the program minimises. Cases that SCIP does not prove in time are printed and not
counted.
"""

import time
from dataclasses import dataclass

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

NUM_CASES = 80
TIME_LIMIT_SECONDS = 60.0
ALLOWED_EXCESS = 0.005
CONFIGS = ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (2, 4), (8, 1), (16, 1))


@dataclass(frozen=True)
class Case:
    """`num_gpus`, the configurations that may be used, and tenants of one length each."""

    number: int
    num_gpus: int
    pool: Candidates
    workload: Workload
    planner: PlannerConfig

    @property
    def batch(self) -> BucketCounts:
        buckets = sample_batches(self.workload, self.planner)[0].buckets
        assert buckets is not None
        return buckets

    def __str__(self) -> str:
        configs = " ".join(str(candidate.config) for candidate in self.pool.usable)
        step = " + ".join(f"{n} x {s}" for s, n in zip(self.batch.uppers, self.batch.counts, strict=True))
        return f"case {self.number:2}: {self.num_gpus:2} GPUs, {configs}; {step} tokens"


def random_case(number: int) -> Case:
    """2 to 16 GPUs, 2 to 6 configurations, 1 to 5 lengths in as many buckets or fewer, up to 10 sequences of each."""
    rng = np.random.default_rng([17, number])
    num_gpus = int(rng.integers(2, 17))
    possible = [config for config in CONFIGS if config[0] * config[1] <= num_gpus]
    chosen = rng.permutation(len(possible))[: int(rng.integers(2, 7))]
    usable = tuple(random_candidate(rng, ParallelConfig(*possible[k])) for k in sorted(chosen.tolist()))
    roomiest = max(candidate.max_chunk_tokens for candidate in usable)
    longest = min(roomiest, int(rng.integers(8, 49)))
    lengths = np.unique(rng.integers(2, longest + 1, int(rng.integers(1, 6))))
    one = np.array([1])
    tenants = tuple(
        TenantWorkload(f"of {n}", np.array([n]), one, int(rng.integers(1, 11 if n <= longest // 2 else 4)))
        for n in lengths.tolist()
    )
    planner = PlannerConfig(num_evaluation_batches=1, num_buckets=int(rng.integers(1, len(lengths) + 1)))
    return Case(number, num_gpus, Candidates(usable), Workload(tenants), planner)


def random_candidate(rng: np.random.Generator, config: ParallelConfig) -> Candidate:
    """More tensor parallelism is faster at a loss, pipelines lose nothing but their bubble, and noise decides."""
    noise = rng.uniform(0.8, 1.25, 3)
    speed = config.tp**0.8 * config.pp
    room = int(16 * config.num_gpus * rng.uniform(0.8, 1.5))
    return Candidate(config, room, 0.5 * noise[0] / config.pp, 0.1 * noise[1] / speed, 0.002 * noise[2] / speed)


@pytest.mark.slow
@pytest.mark.timeout(NUM_CASES * 70)
def test_plans_are_those_of_the_exact_program_or_hardly_above() -> None:
    excess: dict[int, float] = {}
    print()
    for case in map(random_case, range(NUM_CASES)):
        plan = plan_deployment(case.workload, case.pool, case.num_gpus, case.planner)
        start = time.perf_counter()
        exact = exact_deployment([case.batch], case.pool.usable, case.num_gpus, TIME_LIMIT_SECONDS)
        seconds = time.perf_counter() - start
        assert plan.lower_bound_seconds <= exact.step_seconds * (1 + 1e-6)
        difference = plan.predicted_step_seconds / exact.step_seconds - 1
        if exact.is_optimal:
            excess[case.number] = difference
        how = "" if exact.is_optimal else f", not proven (bound {exact.lower_bound_seconds:.3f})"
        makespans = f"{plan.predicted_step_seconds:.3f} s, exact {exact.step_seconds:.3f}{how} in {seconds:.1f} s"
        print(f"{case}: {makespans}: {difference:+.2%}", flush=True)
    above = {number: f"{value:.2%}" for number, value in excess.items() if value > ALLOWED_EXCESS}
    print(f"{len(excess)} of {NUM_CASES} proven; above {ALLOWED_EXCESS:.1%}: {above or 'none'}")
    assert min(excess.values()) > -1e-5
    # BENCHMARKS.md names the known cases above; more or worse ones would be a step back
    assert len(above) <= 2
    assert max(excess.values()) <= 0.03
