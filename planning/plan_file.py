"""The deployment plan as JSON: what `lobra plan --json` prints and the run folder keeps, `schema_version` 1."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from planning.config import PositiveInt, Section
from planning.errors import InputError
from planning.types import DeploymentPlan, ParallelConfig, PlanAlternative, PrunedConfig, ReplicaGroup

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Group(Section):
    tp: PositiveInt
    pp: PositiveInt
    replicas: PositiveInt


class _Pruned(Section):
    tp: PositiveInt
    pp: PositiveInt
    reason: str


class _Alternative(Section):
    plan: Annotated[tuple[_Group, ...], Field(min_length=1)]
    predicted_step_seconds: Seconds


class _PlanFile(Section):
    schema_version: Literal[1]
    plan: Annotated[tuple[_Group, ...], Field(min_length=1)]
    num_gpus: PositiveInt
    predicted_step_seconds: Seconds
    lower_bound_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    gap: float
    solve_seconds: Seconds
    gpu_seconds_per_step: Seconds
    tenants: dict[str, Seconds]
    pruned: tuple[_Pruned, ...]
    alternatives: tuple[_Alternative, ...]
    bucket_uppers: tuple[PositiveInt, ...] = ()
    caveat: str = ""


def plan_to_dict(plan: DeploymentPlan) -> dict[str, Any]:
    """Plain lists, dicts, numbers and strings. `tenants` are GPU seconds per step; they add up to the step's."""
    return {
        "schema_version": 1,
        "plan": _groups_to_list(plan.groups),
        "num_gpus": plan.num_gpus,
        "predicted_step_seconds": plan.predicted_step_seconds,
        "lower_bound_seconds": plan.lower_bound_seconds,
        "gap": plan.gap,
        "solve_seconds": plan.solve_seconds,
        "gpu_seconds_per_step": plan.num_gpus * plan.predicted_step_seconds,
        "tenants": dict(plan.tenant_gpu_seconds),
        "pruned": [{"tp": entry.config.tp, "pp": entry.config.pp, "reason": entry.reason} for entry in plan.pruned],
        "alternatives": [
            {"plan": _groups_to_list(other.groups), "predicted_step_seconds": other.predicted_step_seconds}
            for other in plan.alternatives
        ],
        "bucket_uppers": list(plan.bucket_uppers),
        "caveat": plan.caveat,
    }


def plan_from_dict(data: object) -> DeploymentPlan:
    """The inverse of `plan_to_dict`; `gap` and `gpu_seconds_per_step` are derived anew.

    Raises InputError naming the field that is wrong.
    """
    try:
        file = _PlanFile.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "(whole file)"
        raise InputError(f"plan file: field {field}: {first['msg']}; correct the field or plan again") from error
    plan = DeploymentPlan(
        groups=_groups_from(file.plan),
        num_gpus=file.num_gpus,
        predicted_step_seconds=file.predicted_step_seconds,
        lower_bound_seconds=file.lower_bound_seconds,
        solve_seconds=file.solve_seconds,
        tenant_gpu_seconds=file.tenants,
        pruned=tuple(PrunedConfig(ParallelConfig(entry.tp, entry.pp), entry.reason) for entry in file.pruned),
        alternatives=tuple(
            PlanAlternative(_groups_from(other.plan), other.predicted_step_seconds) for other in file.alternatives
        ),
        bucket_uppers=file.bucket_uppers,
        caveat=file.caveat,
    )
    if plan.num_used_gpus > plan.num_gpus:
        raise InputError(
            f"plan file: field plan: its replicas use {plan.num_used_gpus} GPUs, but num_gpus is {plan.num_gpus}; "
            "correct the field or plan again"
        )
    return plan


def _groups_to_list(groups: tuple[ReplicaGroup, ...]) -> list[dict[str, int]]:
    return [{"tp": group.config.tp, "pp": group.config.pp, "replicas": group.num_replicas} for group in groups]


def _groups_from(groups: tuple[_Group, ...]) -> tuple[ReplicaGroup, ...]:
    return tuple(ReplicaGroup(ParallelConfig(group.tp, group.pp), group.replicas) for group in groups)
