"""The phases of a run as JSON: what a run folder keeps as plan.json, `schema_version` 1."""

from collections.abc import Sequence
from typing import Any

from planning.errors import InputError
from planning.plan_file import plan_from_dict, plan_to_dict
from planning.strategies import Phase

SCHEMA_VERSION = 1


def phases_to_dict(phases: Sequence[Phase]) -> dict[str, Any]:
    """Tenants and plan of every phase, in training order."""
    content = [{"tenants": list(phase.tenants), "plan": plan_to_dict(phase.plan)} for phase in phases]
    return {"schema_version": SCHEMA_VERSION, "phases": content}


def phases_from_dict(content: dict[str, Any]) -> tuple[Phase, ...]:
    """The inverse of `phases_to_dict`. Raises InputError when the file is damaged or of another version."""
    if content.get("schema_version") != SCHEMA_VERSION or not content.get("phases"):
        raise InputError("plan.json is damaged or of another version; add --fresh to plan anew")
    return tuple(Phase(tuple(phase["tenants"]), plan_from_dict(phase["plan"])) for phase in content["phases"])


def describe(phases: Sequence[Phase]) -> str:
    """The plans in order, each named once where it repeats."""
    return ", then ".join(dict.fromkeys(str(phase.plan) for phase in phases))
