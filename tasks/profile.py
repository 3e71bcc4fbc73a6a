"""Prefect task that measures the profile of a run's parallel configurations on this machine."""

from pathlib import Path

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from planning.types import ParallelConfig
from training.profile_fit import MeasuredProfile
from training.profile_store import profile_identity, read_stored, store_profile
from training.profiler import ProfileRequest, is_complete
from training.profiler import measure_profile as measure


@task(name="measure_profile", cache_policy=NO_CACHE)
def measure_profile(request: ProfileRequest, stored: Path, force: bool = False) -> Path:
    """Measure and store the profile of a run, and return its path.

    A stored one is kept if it has every configuration that the run may use, unless `force`.
    """
    logger = get_run_logger()
    if not force and stored.exists() and is_complete(request, read_stored(stored)):
        logger.info("profile %s is stored already", stored)
        return stored

    def report_progress(num_done: int, num_configs: int, config: ParallelConfig) -> None:
        logger.info("profile: %d of %d configurations measured, at %s", num_done, num_configs, config)

    identity = profile_identity(request.base, request.base_model, request.tenants, request.cluster, request.activations)
    measured = measure(request, report_progress)
    store_profile(measured, identity, stored)
    create_markdown_artifact(profile_markdown(measured), key="profile", description="Measured profile")
    return stored


def profile_markdown(measured: MeasuredProfile) -> str:
    """Measured factors, overheads and bytes per configuration, and the error of the fit."""
    rows = [
        f"| {config} | {entry.stage_factor:.3f} | {entry.step_overhead_seconds * 1e3:.1f} | "
        f"{entry.bytes_per_token:.0f} | {measured.modelled_bytes_per_token[config]:.0f} |"
        for config, entry in measured.profile.measured.items()
    ]
    return "\n".join(
        [
            "| configuration | stage factor | step overhead (ms) | bytes per token | memory model |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
            measured.profile.source,
        ]
    )
