"""Deployment plans worth a closer look, by expected counts: the integer program at falling T, then their neighbours.

A plan is an array of replica counts, one per candidate (I). The step's length T is fixed for each integer program and
moves to the program's own estimate T / v, starting from the bound that allows fractions of replicas.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from planning.deployment_milp import best_throughputs
from planning.shares import CostTable, fractional_step, longest_alone, shares
from planning.split_lp import SplitSolver, StepCosts, prices

CONVERGED = 2e-3
MAX_PROGRAMS = 6
NUM_NEIGHBOURS = 24  # of the best plan, in each round
MAX_NEIGHBOUR_PROGRAMS = 100
NUM_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class ExpectedPlan:
    """Replicas per candidate, and the shortest step for expected counts, fractions of sequences allowed."""

    counts: tuple[int, ...]
    step_seconds: float


class PlanSearch:
    """Plans of at most `num_gpus` GPUs that hold the last class, weighed once each by their linear program."""

    def __init__(self, costs: StepCosts, num_gpus: int) -> None:
        self._costs, self._num_gpus = costs, num_gpus
        self._solver = SplitSolver()
        self._known: dict[tuple[int, ...], float] = {}

    def promising(self) -> list[ExpectedPlan]:
        """The integer program's plans and the neighbours of the best, shortest expected step first."""
        for plan in _program_plans(self._costs.classes, self._costs.demand, self._num_gpus):
            self._step_seconds(tuple(plan.tolist()))
        expanded: set[tuple[int, ...]] = set()
        for _ in range(NUM_ROUNDS):
            best = self._ordered(list(self._known))[0].counts
            if best in expanded:
                break
            expanded.add(best)
            self.neighbours(best)
        return self._ordered(list(self._known))

    def neighbours(self, counts: tuple[int, ...]) -> list[ExpectedPlan]:
        """The plans next to this one with the smallest loads, shortest expected step first.

        A replica of candidate i is worth z_i = max_j price_j / share_ij by the prices of any plan's program, and the
        load of every other plan p' is at least (the load of that one) / (p' z): so few programs find the smallest.
        Plans on which some sequence alone takes longer than this plan's step come last.
        """
        costs, plan = self._costs, np.array(counts)
        share, _ = shares(costs.classes, self._step_seconds(counts))
        plans = np.unique(np.concatenate(list(_neighbours(plan, costs.classes.num_gpus, self._num_gpus))), axis=0)
        holds_last = plans @ (costs.classes.capacity[:, -1] > 0) > 0
        serves = _serves_all(share, plans)
        slower = plans[holds_last & ~serves][: max(0, MAX_NEIGHBOUR_PROGRAMS - int(serves.sum()))]
        plans = plans[serves]
        bound, solved = np.zeros(len(plans)), np.zeros(len(plans), dtype=bool)
        for _ in range(min(MAX_NEIGHBOUR_PROGRAMS, len(plans))):
            k = int(np.where(solved, np.inf, bound).argmin())
            if solved.sum() > NUM_NEIGHBOURS and np.partition(bound[solved], NUM_NEIGHBOURS - 1)[-1] <= bound[k]:
                break
            split = self._solver.solve(share[None], plans[k], costs.demand)
            price = prices(split.value, share[None], plans[k])
            bound = np.maximum(bound, split.load / (plans @ (price / share).max(axis=1)))
            bound[k], solved[k] = split.load, True
        best = np.flatnonzero(solved)[np.argsort(bound[solved], kind="stable")[:NUM_NEIGHBOURS]]
        return self._ordered(map(tuple, np.concatenate([plans[best], slower]).tolist()))

    def _step_seconds(self, key: tuple[int, ...]) -> float:
        if key not in self._known:
            self._known[key] = self._solver.shortest_step(self._costs, np.array(key)).step_seconds
        return self._known[key]

    def _ordered(self, keys: Iterable[tuple[int, ...]]) -> list[ExpectedPlan]:
        plans = [ExpectedPlan(key, self._step_seconds(key)) for key in keys]
        return sorted(plans, key=lambda plan: (plan.step_seconds, plan.counts))


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


def _serves_all(share: np.ndarray, plans: np.ndarray) -> np.ndarray:
    """Which plans (rows) have a replica for every class."""
    return np.asarray(((plans > 0) @ np.isfinite(share) > 0).all(axis=1))


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
