"""Deployment plans worth a closer look, by expected counts: the integer program at falling T, then their neighbours.

A plan is an array of replica counts, one per candidate (I). The step's length T is fixed for each integer program and
moves to the program's own estimate T / v, starting from the bound that allows fractions of replicas.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planning.deployment_milp import best_throughputs
from planning.shares import CostTable, fractional_step, longest_alone, shares
from planning.split_lp import SplitSolver, StepCosts, prices

CONVERGED = 2e-3
MAX_PROGRAMS = 6
NUM_NEIGHBOURS = 16  # of the best plan, weighed by their linear program in each round
NUM_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class ExpectedPlan:
    """Replicas per candidate, and the shortest step for expected counts, fractions of sequences allowed."""

    counts: tuple[int, ...]
    step_seconds: float


def promising_plans(costs: StepCosts, num_gpus: int) -> list[ExpectedPlan]:
    """Plans of at most `num_gpus` GPUs, best expected step first; the last class fits into each of them."""
    solver = SplitSolver()
    table, demand_J = costs.classes, costs.demand
    known: dict[tuple[int, ...], float] = {}

    def weigh(plans: list[np.ndarray]) -> None:
        for plan in plans:
            key = tuple(plan.tolist())
            if key not in known:
                known[key] = solver.shortest_step(costs, plan).step_seconds

    weigh(_program_plans(table, demand_J, num_gpus))
    expanded: set[tuple[int, ...]] = set()
    for _ in range(NUM_ROUNDS):
        best = min(known, key=lambda key: (known[key], key))
        if best in expanded:
            break
        expanded.add(best)
        weigh(_best_neighbours(costs, num_gpus, np.array(best), solver))
    return [ExpectedPlan(key, known[key]) for key in sorted(known, key=lambda key: (known[key], key))]


def _program_plans(table: CostTable, demand_J: np.ndarray, num_gpus: int) -> list[np.ndarray]:
    shortest = longest_alone(table, np.full(len(table.depth), True))
    step_seconds = fractional_step(table, demand_J, num_gpus)
    plans: list[np.ndarray] = []
    for _ in range(MAX_PROGRAMS):
        share, _ = shares(table, step_seconds)
        found = best_throughputs(share, demand_J, table.num_gpus, num_gpus)
        plans += found.plans
        estimate = max(shortest, step_seconds / found.upper_bound)
        if abs(estimate / step_seconds - 1) < CONVERGED:
            break
        step_seconds = estimate
    return plans


def _best_neighbours(costs: StepCosts, num_gpus: int, plan: np.ndarray, solver: SplitSolver) -> list[np.ndarray]:
    """The neighbours of a plan that its dual prices call best.

    A replica of candidate i is worth z_i = max_j price_j / share_ij; the load of any other plan p' is at least
    (the load of this one) / (p' z), so large p' z comes first.
    """
    table = costs.classes
    shortest = solver.shortest_step(costs, plan)
    share, _ = shares(table, shortest.step_seconds)
    worth = (prices(shortest.split.value, share, plan) / share).max(axis=1)
    neighbours = np.unique(np.concatenate(list(_neighbours(plan, table.num_gpus, num_gpus))), axis=0)
    neighbours = neighbours[(neighbours @ (table.capacity[:, -1] > 0)) > 0]
    order = np.argsort(-(neighbours @ worth), kind="stable")[: NUM_NEIGHBOURS + 1]
    return list(neighbours[order])


def _neighbours(plan: np.ndarray, num_gpus_I: np.ndarray, num_gpus: int) -> Iterator[np.ndarray]:
    """Arrays of plans that differ from `plan` by at most two replicas taken away, and the free GPUs used otherwise."""
    unit = np.eye(len(plan), dtype=np.int64)
    present = np.flatnonzero(plan)
    removals = [np.zeros_like(plan), *unit[present], *(unit[i] + unit[k] for i in present for k in present if i <= k)]
    additions: dict[int, np.ndarray] = {}
    for removal in removals:
        if (removal > plan).any():
            continue
        free = num_gpus - int((plan - removal) @ num_gpus_I)
        if free not in additions:
            additions[free] = np.array(list(_additions(free, num_gpus_I, unit)))
        yield plan - removal + additions[free]


def _additions(free: int, num_gpus_I: np.ndarray, unit: np.ndarray) -> Iterator[np.ndarray]:
    """Ways to use `free` GPUs: one or as many as possible of one candidate, then as many as possible of another."""
    yield np.zeros(len(unit), dtype=np.int64)
    for i, needed in enumerate(num_gpus_I.tolist()):
        most = free // needed
        for count in sorted({min(1, most), most} - {0}):
            yield count * unit[i]
            rest = free - count * needed
            for k, other in enumerate(num_gpus_I.tolist()):
                if rest >= other:
                    yield count * unit[i] + rest // other * unit[k]
