"""How many GPUs are worth having? Plans for several numbers of them, and where more stop shortening the step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planning.types import DeploymentPlan

WORTHWHILE = 0.02  # relative saving of step time below which more GPUs are called useless


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Plans by rising number of GPUs; beyond `useful_gpus` the step hardly shortens, and `reason` says why."""

    plans: tuple[DeploymentPlan, ...]
    useful_gpus: int
    reason: str


def doubled_gpus(most: int, fewest: int = 8) -> tuple[int, ...]:
    """8, 16, 32, ... up to and including `most`."""
    numbers = []
    number = min(fewest, most)
    while number < most:
        numbers.append(number)
        number *= 2
    return (*numbers, most)


def judge(plans: Sequence[DeploymentPlan]) -> WhatIf:
    """The smallest number of GPUs that no larger one beats by more than `WORTHWHILE`.

    Where the plan on fewer GPUs is faster it stands for the larger number too, with the other GPUs left out.
    """
    ordered: tuple[DeploymentPlan, ...] = ()
    for plan in sorted(plans, key=lambda plan: plan.num_gpus):
        slower = ordered and plan.predicted_step_seconds > ordered[-1].predicted_step_seconds
        ordered = (*ordered, _on_more_gpus(ordered[-1], plan) if slower else plan)
    for place, plan in enumerate(ordered):
        shortest = min(other.predicted_step_seconds for other in ordered[place:])
        if shortest >= plan.predicted_step_seconds * (1 - WORTHWHILE):
            break
    last = ordered[-1]
    if plan is last:
        spent = [one.num_gpus * one.predicted_step_seconds for one in (ordered[0], last)]
        reason = (
            f"every number up to {last.num_gpus} GPUs still shortens the step; GPU seconds per step change from "
            f"{spent[0]:.4g} to {spent[1]:.4g}"
        )
    else:
        above = plan.predicted_step_seconds / plan.longest_alone_seconds - 1
        reason = (
            f"beyond {plan.num_gpus} GPUs the step stays at about {plan.predicted_step_seconds:.4g} s: the longest "
            f"sequence of a step alone takes {plan.longest_alone_seconds:.4g} s on average ({above:.0%} less room is "
            "left), and one sequence never spreads over several replicas; shorten tenants[].dataset.max_length, or "
            "raise the batch sizes"
        )
    return WhatIf(ordered, plan.num_gpus, reason)


def _on_more_gpus(smaller: DeploymentPlan, larger: DeploymentPlan) -> DeploymentPlan:
    """The smaller plan on the larger one's GPUs: the idle ones are part of every tenant's bill."""
    bill = {
        name: gpu_seconds * larger.num_gpus / smaller.num_gpus
        for name, gpu_seconds in smaller.tenant_gpu_seconds.items()
    }
    return replace(
        larger,
        groups=smaller.groups,
        predicted_step_seconds=smaller.predicted_step_seconds,
        tenant_gpu_seconds=bill,
    )
