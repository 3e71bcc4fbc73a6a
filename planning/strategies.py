"""What each strategy trains, in which order, on which plan (paper, section 5.1 and appendix B.2).

lobra             all tenants together, unequal replicas
lobra_sequential  one tenant after the other, unequal replicas
task_fused        all tenants together, equal replicas
task_sequential   one tenant after the other, equal replicas

Every plan is the best that the same search, ranking and dispatch find under the same batching: no baseline is a straw
man.
"""

from dataclasses import dataclass

from planning.candidates import Candidates
from planning.config import PlannerConfig
from planning.deployment import plan_deployment
from planning.types import DeploymentPlan
from planning.workload import Workload


@dataclass(frozen=True, slots=True)
class Phase:
    """Tenants that train together, and the plan that they train on; the fleet changes only when the plan does."""

    tenants: tuple[str, ...]
    plan: DeploymentPlan


def strategy_phases(
    workload: Workload, candidates: Candidates, num_gpus: int, planner: PlannerConfig
) -> tuple[Phase, ...]:
    """The phases of `planner.strategy`, in training order: one, or one per tenant in the workload's order.

    Raises PlanInfeasibleError as `plan_deployment` does.
    """
    together = [Workload((tenant,)) for tenant in workload.tenants] if planner.strategy.is_sequential else [workload]
    return tuple(
        Phase(
            tuple(tenant.name for tenant in part.tenants),
            plan_deployment(part, candidates, num_gpus, planner),
        )
        for part in together
    )
