"""The flow `profile`: what a run's parallel configurations cost on this machine, measured and stored.

Runs from the command line (`lobra profile`) and as a Prefect deployment. A run with `profile.source: measure` uses what
it stored, and measures by itself when nothing is.
"""

from pathlib import Path

import polars as pl
from prefect import flow

import tasks.profile
from data_prep.histogram import measure_lengths
from data_prep.prepare import prepare_tenants
from flows.config import RunConfig
from flows.preview import prepare_requests, stored_profile_path
from flows.validation import check_run
from training.base_model import BaseModel
from training.deployment import split_outcomes
from training.profiler import ProfileRequest


@flow(name="profile", flow_run_name="profile-{run.name}", validate_parameters=True)
def profile(run: RunConfig, force: bool = False) -> str:
    """Measure the profile of a run unless it is stored already, or in any case with `force`; returns its path."""
    base = check_run(run)
    stored = stored_profile_path(run)
    requests = prepare_requests(run, base, run.data.cache_dir / "preview" / run.name)
    prepared, _ = split_outcomes(prepare_tenants(requests, run.data.num_workers), run.training.allows_failures)
    request = profile_request(run, base, measure_lengths(prepared))
    return str(tasks.profile.measure_profile(request, stored, force))


def profile_request(run: RunConfig, base: BaseModel, histogram: pl.DataFrame) -> ProfileRequest:
    """What to measure for a run whose sequences have these lengths. A tenant without any is left out."""
    with_data = set(histogram["tenant"])
    return ProfileRequest(
        base=base,
        base_model=run.base_model,
        tenants=tuple(tenant for tenant in run.tenants if tenant.name in with_data),
        cluster=run.cluster,
        planner=run.planner,
        activations=run.training.activations,
        histogram=histogram,
        log_dir=Path(run.data.cache_dir) / "profiles" / "logs",
    )
