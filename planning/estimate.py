"""What a whole run will cost every tenant, before it starts.

A phase is cut where one of its tenants ends: from then on the others pay for the idle time of its replicas too. Each
span costs its number of steps times the mean of a few steps, drawn from the length histograms of the tenants that are
left and dispatched as training will.

Not foreseen: launches, evaluations, checkpoints (overhead, which nobody is charged), tenants that stop early or fail.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from planning.config import PlannerConfig
from planning.dispatch import Dispatcher, dispatcher_for
from planning.metrics import step_overhead_seconds, tenant_shares
from planning.strategies import Phase
from planning.types import Candidate, DeploymentPlan, ParallelConfig, SequenceRef
from planning.workload import TenantWorkload, Workload

NUM_STEPS = 8  # drawn per span,
MAX_DRAWN_STEPS = 128  # fewer where a phase has many spans
LEAST_STEPS = 2


def estimated_gpu_seconds(
    phases: Sequence[Phase],
    num_steps: Mapping[str, int],
    workload: Workload,
    candidates: Mapping[ParallelConfig, Candidate],
    planner: PlannerConfig,
) -> dict[str, float]:
    """GPU seconds of each tenant over its `num_steps` steps, idle time of the reserved GPUs included."""
    by_name = {tenant.name: tenant for tenant in workload.tenants}
    rng = np.random.default_rng(planner.seed)
    total: dict[str, float] = defaultdict(float)
    for phase in phases:
        dispatcher = dispatcher_for(phase.plan, candidates, planner)
        spans = list(_spans({name: num_steps[name] for name in phase.tenants}))
        num_drawn = max(LEAST_STEPS, min(NUM_STEPS, MAX_DRAWN_STEPS // len(spans)))
        for names, length in spans:
            part = Workload(tuple(by_name[name] for name in names))
            for _ in range(num_drawn):
                for name, gpu_seconds in _drawn_step(part, dispatcher, phase.plan, candidates, rng).items():
                    total[name] += gpu_seconds * length / num_drawn
    return dict(total)


def _spans(num_steps: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], int]]:
    """The tenants that train together, and for how many steps, until the last one ends."""
    done = 0
    for end in sorted(set(num_steps.values())):
        yield tuple(name for name, steps in num_steps.items() if steps >= end), end - done
        done = end


def _drawn_step(
    workload: Workload,
    dispatcher: Dispatcher,
    plan: DeploymentPlan,
    candidates: Mapping[ParallelConfig, Candidate],
    rng: np.random.Generator,
) -> dict[str, float]:
    drawn = zip(workload.tenants, workload.sample_lengths(rng), strict=True)
    dispatch = dispatcher.dispatch([sequence for tenant, lengths in drawn for sequence in _sequences(tenant, lengths)])
    seconds = dispatch.predicted_seconds + step_overhead_seconds(plan.replicas, candidates)
    shares = tenant_shares(dispatch.chunks, plan.replicas, candidates)
    return {name: share * plan.num_gpus * seconds for name, share in shares.items()}


def _sequences(tenant: TenantWorkload, lengths: np.ndarray) -> list[SequenceRef]:
    """Drawn lengths as sequences; the rows only tell them apart."""
    return [SequenceRef(tenant.name, row, length) for row, length in enumerate(lengths.tolist())]
