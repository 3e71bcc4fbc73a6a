"""Deployment plan: how many replicas of which configuration (paper, section 4.1 and appendix D, Eq. 1 and 2).

1. `deployment_search` proposes plans for the expected batch, by integer programs and their neighbours;
2. `plan_ranking` lets the integer dispatcher run the best of them on sampled batches;
3. `deployment_bound` says how far from the best possible plan the winner can be.

GPUs may stay unused when that is as fast. The plan is deterministic: searches count, they do not look at a clock.
"""

import time

import numpy as np

from planning.bucketing import choose_uppers
from planning.candidates import Candidates
from planning.config import Batching, BucketRule, PlannerConfig
from planning.deployment_bound import makespan_bound
from planning.deployment_search import ExpectedPlan, PlanSearch
from planning.dispatch import MAX_KICKED, NUM_CLASSES
from planning.errors import PlanInfeasibleError
from planning.plan_ranking import PlanRace, Trial, sample_batches
from planning.shares import cost_table
from planning.split_lp import StepCosts, bucket_costs, class_costs, class_ends
from planning.types import Candidate, DeploymentPlan, PlanAlternative, ReplicaGroup
from planning.workload import Workload

NUM_RANKED = 8  # plans that the integer dispatcher runs
NUM_RANKED_SMALL = 30  # where a step is a handful of sequences, whose grain the programs do not see
NUM_NEIGHBOURS_RANKED = 8
NUM_CLIMBS = 3
WORTH_RANKING = 0.05  # plans whose expected step is longer by more than this are not run; a heuristic, to save time


def longest_sequence_tokens(candidates: Candidates) -> int:
    """The longest sequence that any candidate holds, in tokens."""
    return candidates.roomiest.max_chunk_tokens


def plan_deployment(
    workload: Workload,
    candidates: Candidates,
    num_gpus: int,
    planner: PlannerConfig,
    warm_start: tuple[ReplicaGroup, ...] = (),
) -> DeploymentPlan:
    """The plan with the shortest mean step on sampled batches among those proposed, and its certificate.

    `warm_start` is proposed too, so the plan is never worse than it. `lower_bound_seconds` bounds the mean step of any
    plan (`deployment_bound`). Raises PlanInfeasibleError when the longest sequence fits on no candidate of at most
    `num_gpus` GPUs.
    """
    start = time.perf_counter()
    usable = _usable(workload, candidates, num_gpus)
    lengths, counts = workload.expected_counts()
    uppers = choose_uppers(lengths, counts, planner.num_buckets)
    fixed_uppers = tuple(uppers.tolist()) if planner.bucket_rule is BucketRule.FIXED else ()
    batches = sample_batches(workload, planner, fixed_uppers)
    race = PlanRace(batches, {candidate.config: candidate for candidate in usable}, planner)
    if planner.strategy.is_homogeneous:
        winner = race.run(_homogeneous(workload, usable, num_gpus))
    else:
        winner = _climb(race, PlanSearch(_expected_costs(workload, usable, planner), num_gpus), usable, warm_start)
    shares = winner.tenant_gpu_seconds(num_gpus).tolist()
    bound = makespan_bound(batches, usable, num_gpus)
    return DeploymentPlan(
        groups=winner.groups,
        num_gpus=num_gpus,
        predicted_step_seconds=winner.mean_seconds,
        lower_bound_seconds=bound.seconds,
        longest_alone_seconds=bound.longest_alone_seconds,
        solve_seconds=time.perf_counter() - start,
        tenant_gpu_seconds={tenant.name: part for tenant, part in zip(workload.tenants, shares, strict=True)},
        pruned=candidates.pruned,
        alternatives=tuple(PlanAlternative(other.groups, other.mean_seconds) for other in race.finished[1:]),
        bucket_uppers=fixed_uppers,
        caveat=candidates.caveat,
    )


def _expected_costs(workload: Workload, usable: tuple[Candidate, ...], planner: PlannerConfig) -> StepCosts:
    """The expected batch: in the buckets with the least padding, or in classes of true lengths."""
    lengths, counts = workload.expected_counts()
    if planner.batching is Batching.PACKED:
        room = np.array([candidate.max_chunk_tokens for candidate in usable])
        ends = class_ends(lengths, counts, room, NUM_CLASSES)
        return class_costs(cost_table(usable, lengths, Batching.PACKED), counts, ends)
    uppers = choose_uppers(lengths, counts, planner.num_buckets)
    demand = np.bincount(np.searchsorted(uppers, lengths), weights=counts)
    return bucket_costs(cost_table(usable, uppers), demand)


def _climb(
    race: PlanRace, search: PlanSearch, usable: tuple[Candidate, ...], warm_start: tuple[ReplicaGroup, ...]
) -> Trial:
    """The winner of the proposals, then of its neighbours, as long as a neighbour wins."""
    small = search.num_sequences <= MAX_KICKED
    promising = search.promising()[: NUM_RANKED_SMALL if small else NUM_RANKED]
    longest = np.inf if small else promising[0].step_seconds * (1 + WORTH_RANKING)
    proposals = [_groups(plan, usable) for plan in promising if plan.step_seconds <= longest]
    winner = race.run([*proposals, *([warm_start] if warm_start else [])])
    for _ in range(NUM_CLIMBS):
        neighbours = search.neighbours(_counts(winner.groups, usable))[:NUM_NEIGHBOURS_RANKED]
        near = [_groups(plan, usable) for plan in neighbours if plan.step_seconds <= longest]
        best = race.run([winner.groups, *near])
        if best is winner:
            break
        winner = best
    return winner


def _homogeneous(workload: Workload, usable: tuple[Candidate, ...], num_gpus: int) -> list[tuple[ReplicaGroup, ...]]:
    """As many equal replicas as there is room for, of each configuration that holds the longest sequence."""
    return [
        (ReplicaGroup(candidate.config, num_gpus // candidate.config.num_gpus),)
        for candidate in usable
        if candidate.max_chunk_tokens >= workload.longest_tokens
    ]


def _usable(workload: Workload, candidates: Candidates, num_gpus: int) -> tuple[Candidate, ...]:
    """The candidates of at most `num_gpus` GPUs, once one of them holds the longest sequence."""
    usable = tuple(candidate for candidate in candidates.usable if candidate.config.num_gpus <= num_gpus)
    if not usable:
        smallest = min(candidate.config.num_gpus for candidate in candidates.usable)
        raise PlanInfeasibleError(f"no candidate fits on {num_gpus} GPUs; raise cluster.num_gpus to {smallest}")
    roomiest = Candidates(usable).roomiest
    if workload.longest_tokens > roomiest.max_chunk_tokens:
        raise PlanInfeasibleError(
            f"longest sequence has {workload.longest_tokens} tokens (tenant {workload.longest_tenant}), but the "
            f"roomiest candidate {roomiest.config} holds {roomiest.max_chunk_tokens}; raise cluster.num_gpus, "
            f"planner.max_tp or cluster.memory_per_gpu_gib, or set tenants[].dataset.max_length <= "
            f"{roomiest.max_chunk_tokens}"
        )
    return usable


def _counts(groups: tuple[ReplicaGroup, ...], usable: tuple[Candidate, ...]) -> tuple[int, ...]:
    num_replicas = {group.config: group.num_replicas for group in groups}
    return tuple(num_replicas.get(candidate.config, 0) for candidate in usable)


def _groups(plan: ExpectedPlan, usable: tuple[Candidate, ...]) -> tuple[ReplicaGroup, ...]:
    """The groups of a plan, largest tp first: blocks of falling powers of two never straddle a node."""
    groups = [
        ReplicaGroup(candidate.config, count) for candidate, count in zip(usable, plan.counts, strict=True) if count
    ]
    return tuple(sorted(groups, key=lambda group: group.config, reverse=True))
