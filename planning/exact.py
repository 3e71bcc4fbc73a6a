"""The exact deployment of small cases, reference of the fast search: the paper's Eq. 1 and 2 per replica, in SCIP.

Data       batches of sequences in buckets: demand_bj; candidates i with A_ij, a_i, pp_i and chunk capacity_ij;
           max_replicas_i = max_gpus // num_gpus_i, each replica r of i present or not.
Variables  y_r binary: replica r is deployed; n_brj integer sequences; k_brjq integer chunks of up to q sequences,
           u_brjq binary: there are some; m_br >= 0 seconds of the largest chunk; T_b >= 0 makespan of batch b.
Minimise   mean of T_b
subject to every_sequence_is_computed(b, j):  sum_r n_brj = demand_bj
           chunks_hold_the_sequences(b, r, j):  n_brj <= sum_q q k_brjq
           only_sizes_in_use(b, r, j, q):  k_brjq <= demand_bj u_brjq
           only_deployed_replicas_compute(b, r, j):  n_brj <= demand_bj y_r
           largest_chunk(b, r, j, q):  m_br >= (a + A_j q) u_brjq
           replica_meets_the_makespan(b, r):  sum_j (A_j n_brj + a sum_q k_brjq) + (pp - 1) m_br <= T_b
           gpus_suffice:  sum_r num_gpus_r y_r <= max_gpus
           equal_replicas_in_order(r):  y_r >= y_(r + 1) within a candidate

With pp = 1 the only q is the capacity. The paper's program has n <= q k with q a variable; SCIP 10 cut off the optimum
of that bilinear form in presolving, so here sizes are enumerated and everything is linear.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pyscipopt import Model, Variable, quicksum

from planning.dispatch import BucketCounts
from planning.errors import PlanError
from planning.shares import cost_table
from planning.types import Candidate, ReplicaGroup


@dataclass(frozen=True, slots=True)
class ExactPlan:
    """The best plan, its mean makespan over the batches, SCIP's bound, and whether the two met."""

    groups: tuple[ReplicaGroup, ...]
    step_seconds: float
    lower_bound_seconds: float
    is_optimal: bool


def exact_deployment(
    batches: Sequence[BucketCounts], candidates: Sequence[Candidate], max_gpus: int, time_limit_seconds: float
) -> ExactPlan:
    """Solves the program; at the time limit, the best plan found so far. Raises PlanError if there is none."""
    model = Model("exact deployment")
    model.hideOutput()
    model.setParam("limits/time", time_limit_seconds)
    owners = [i for i, candidate in enumerate(candidates) for _ in range(max_gpus // candidate.config.num_gpus)]
    deployed = [model.addVar(f"y_{r}", vtype="B") for r in range(len(owners))]
    sizes = [candidates[i].config.num_gpus for i in owners]
    model.addCons(quicksum(size * y for size, y in zip(sizes, deployed, strict=True)) <= max_gpus, "gpus_suffice")
    for r in range(len(owners) - 1):
        if owners[r] == owners[r + 1]:
            model.addCons(deployed[r] >= deployed[r + 1], f"equal_replicas_in_order_{r}")
    makespans = [_add_batch(model, number, batch, candidates, owners, deployed) for number, batch in enumerate(batches)]
    model.setObjective(quicksum(makespans) / len(batches), "minimize")
    model.optimize()
    if not model.getNSols():
        raise PlanError(f"SCIP found no deployment within {time_limit_seconds:g} s")
    count = np.bincount([owners[r] for r, y in enumerate(deployed) if model.getVal(y) > 0.5], minlength=len(candidates))
    groups = tuple(ReplicaGroup(c.config, int(k)) for c, k in zip(candidates, count, strict=True) if k)
    return ExactPlan(groups, model.getObjVal(), model.getDualbound(), model.getStatus() == "optimal")


def _add_batch(
    model: Model,
    number: int,
    batch: BucketCounts,
    candidates: Sequence[Candidate],
    owners: list[int],
    deployed: list[Variable],
) -> Variable:
    """The variables and constraints of one batch; returns its makespan."""
    table = cost_table(candidates, batch.uppers)
    makespan = model.addVar(f"T_{number}")
    taken: list[list[Variable]] = [[] for _ in batch.uppers]
    for r, i in enumerate(owners):
        fixed, depth = float(table.fixed[i]), int(table.depth[i])
        largest = model.addVar(f"m_{number}_{r}")
        terms = [depth * largest]
        for j, demand in enumerate(batch.counts.tolist()):
            capacity, variable = int(table.capacity[i, j]), float(table.variable[i, j])
            if not capacity:
                continue
            name = f"{number}_{r}_{j}"
            sequences = model.addVar(f"n_{name}", vtype="I", ub=demand)
            model.addCons(sequences <= demand * deployed[r], f"only_deployed_replicas_compute_{name}")
            terms.append(variable * sequences)
            taken[j].append(sequences)
            room = []
            for size in range(1, min(capacity, demand) + 1) if depth else [capacity]:
                chunks = model.addVar(f"k_{name}_{size}", vtype="I", ub=demand)
                terms.append(fixed * chunks)
                room.append(size * chunks)
                if depth:
                    used = model.addVar(f"u_{name}_{size}", vtype="B")
                    model.addCons(chunks <= demand * used, f"only_sizes_in_use_{name}_{size}")
                    model.addCons(largest >= (fixed + variable * size) * used, f"largest_chunk_{name}_{size}")
            model.addCons(sequences <= quicksum(room), f"chunks_hold_the_sequences_{name}")
        model.addCons(quicksum(terms) <= makespan, f"replica_meets_the_makespan_{number}_{r}")
    for j, demand in enumerate(batch.counts.tolist()):
        model.addCons(quicksum(taken[j]) == demand, f"every_sequence_is_computed_{number}_{j}")
    return makespan
