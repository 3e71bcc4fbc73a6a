"""Mixed-integer program of a deployment: how many replicas of which configuration, for a step of T seconds.

Data       demand_J expected sequences per bucket; share_IJ part of a replica's step per sequence at T (`shares`);
           num_gpus_I per replica; max_gpus.
Variables  p_i integer >= 0, replicas; x_ij >= 0, part of bucket j on configuration i; v, throughput.
Maximise   v
subject to every_bucket_is_served(j):  sum_i x_ij = v
           replicas_are_not_overloaded(i):  sum_j share_ij demand_j x_ij <= p_i
           gpus_suffice:  sum_i num_gpus_i p_i <= max_gpus
           longest_bucket_has_a_home:  sum of p_i over the i that can take the last bucket >= 1

T suffices for some plan iff v >= 1. The paper's Eq. 1/2 has T as a variable and is not linear; here T is given, and
`1 / v` is the load r(T) of `planning.shares`, with its bound `T * min(1, 1 / v)` and its fixed point r(T) = 1.
"""

from dataclasses import dataclass

import numpy as np
from pyscipopt import Model, Variable, quicksum

RELATIVE_GAP = 2e-3
MAX_NODES = 2000
TOLERANCE = 1e-6  # SCIP's feasibility tolerance, given away so that the bound stays a bound


@dataclass(frozen=True, slots=True)
class Throughputs:
    """Replica counts (one array of I per distinct solution, best first) and an upper bound of the throughput."""

    plans: tuple[np.ndarray, ...]
    upper_bound: float


def best_throughputs(share: np.ndarray, demand: np.ndarray, num_gpus: np.ndarray, max_gpus: int) -> Throughputs:
    """Solves the program to `RELATIVE_GAP` or `MAX_NODES`, never to a clock. The last bucket must fit somewhere."""
    model, replicas = _build(share * demand, num_gpus, max_gpus)
    model.optimize()
    plans: list[np.ndarray] = []
    for solution in model.getSols():
        plan = np.array([round(model.getSolVal(solution, count)) for count in replicas])
        if not any((plan == known).all() for known in plans):
            plans.append(plan)
    return Throughputs(tuple(plans), model.getDualbound() * (1 + TOLERANCE))


def _build(load: np.ndarray, num_gpus: np.ndarray, max_gpus: int) -> tuple[Model, list[Variable]]:
    configs, buckets = range(load.shape[0]), range(load.shape[1])
    model = Model("deployment")
    model.hideOutput()
    model.setParam("limits/gap", RELATIVE_GAP)
    model.setParam("limits/nodes", MAX_NODES)
    replicas = [model.addVar(f"p_{i}", vtype="I", ub=max_gpus // int(num_gpus[i])) for i in configs]
    part = {(i, j): model.addVar(f"x_{i}_{j}") for i in configs for j in buckets if np.isfinite(load[i, j])}
    throughput = model.addVar("v")
    for j in buckets:
        served = quicksum(part[i, j] for i in configs if (i, j) in part)
        model.addCons(served == throughput, f"every_bucket_is_served_{j}")
    for i in configs:
        own = quicksum(load[i, j] * part[i, j] for j in buckets if (i, j) in part)
        model.addCons(own <= replicas[i], f"replicas_are_not_overloaded_{i}")
    model.addCons(quicksum(int(num_gpus[i]) * replicas[i] for i in configs) <= max_gpus, "gpus_suffice")
    home = quicksum(replicas[i] for i in configs if (i, buckets[-1]) in part)
    model.addCons(home >= 1, "longest_bucket_has_a_home")
    model.setObjective(throughput, "maximize")
    return model, replicas
