"""Prefect tasks of planning: the profile, and the deployment plan. Both are frozen in the run folder."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from planning.candidates import Candidates
from planning.config import ProfileConfig
from planning.phase_file import phases_from_dict, phases_to_dict
from planning.profile import Profile, read_profile, write_profile
from planning.strategies import Phase
from planning.types import ActivationPolicy, DeploymentPlan
from tasks.run_folder import RunFolder, read_json, write_json
from training.deployment import DeploymentRequest, deploy, estimate, load_profile


@task(name="profile", cache_policy=NO_CACHE)
def profile(config: ProfileConfig, stored: Path, activations: ActivationPolicy, folder: RunFolder) -> Profile:
    """The profile that the run file names, kept in the run folder: a resumed run plans with the same one."""
    if folder.profile.exists():
        return read_profile(folder.profile)
    loaded = load_profile(config, stored, activations)
    write_profile(loaded, folder.profile)
    return loaded


@task(name="plan", cache_policy=NO_CACHE)
def plan(
    request: DeploymentRequest, candidates: Candidates, histogram: pl.DataFrame, folder: RunFolder
) -> tuple[Phase, ...]:
    """The strategy's phases with their deployment plans: plan.json, estimate.json, and tables on the run page."""
    if folder.plan.exists():
        return phases_from_dict(read_json(folder.plan))
    phases = deploy(request, candidates, histogram)
    gpu_seconds = estimate(request, candidates, histogram, phases)
    write_json(folder.estimate, {"schema_version": 1, "gpu_seconds": gpu_seconds})
    write_json(folder.plan, phases_to_dict(phases))
    tables = [*(plan_markdown(phase.plan) for phase in phases), estimate_markdown(gpu_seconds)]
    create_markdown_artifact("\n\n".join(tables), key="plan", description="Deployment plan and estimated cost")
    return phases


def estimate_markdown(gpu_seconds: Mapping[str, float]) -> str:
    """What the run is expected to cost each tenant, as a table."""
    rows = [f"| {name} | {cost:.4g} |" for name, cost in gpu_seconds.items()]
    total = f"| all | {sum(gpu_seconds.values()):.4g} |"
    return "\n".join(["| tenant | estimated GPU seconds of the run |", "| --- | --- |", *rows, total])


def plan_markdown(plan: DeploymentPlan) -> str:
    """The plan as a table, with its bound and gap."""
    rows = [
        f"| {group.config} | {group.num_replicas} | {group.num_replicas * group.config.num_gpus} |"
        for group in plan.groups
    ]
    return "\n".join(
        [
            f"**{plan}** on {plan.num_gpus} GPUs, {plan.num_used_gpus} used",
            "",
            "| configuration | replicas | GPUs |",
            "| --- | --- | --- |",
            *rows,
            "",
            f"Predicted step {plan.predicted_step_seconds:.3g} s, lower bound {plan.lower_bound_seconds:.3g} s, "
            f"gap {plan.gap:.1%}, solved in {plan.solve_seconds:.2f} s.",
        ]
    )
