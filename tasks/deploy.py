"""Prefect tasks of planning: the profile, and the deployment plan. Both are frozen in the run folder."""

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
from training.deployment import DeploymentRequest, deploy, load_profile


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
    """The strategy's phases with their deployment plans: plan.json, and a table on the run page."""
    if folder.plan.exists():
        return phases_from_dict(read_json(folder.plan))
    phases = deploy(request, candidates, histogram)
    write_json(folder.plan, phases_to_dict(phases))
    tables = "\n\n".join(plan_markdown(phase.plan) for phase in phases)
    create_markdown_artifact(tables, key="plan", description="Deployment plan")
    return phases


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
