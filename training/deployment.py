"""From the sections of a run file and the measured lengths to a deployment plan. No torch.

This is where the base model and the tenants' adapters turn into the numbers that planning works on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from data_prep.histogram import workload_arrays
from data_prep.prepare import Outcome, PreparedTenant, TenantFailure
from planning.analytic import TYPICAL_ACTIVATIONS
from planning.candidates import Candidates, propose_candidates
from planning.config import ClusterConfig, PlannerConfig, ProfileConfig, ProfileSource
from planning.errors import InputError, ProfileError
from planning.estimate import estimated_gpu_seconds
from planning.profile import Profile, preset_names, read_preset, read_profile
from planning.strategies import Phase, strategy_phases
from planning.types import ActivationPolicy
from planning.workload import TenantWorkload, Workload
from training.base_model import BaseModel
from training.config import BaseModelConfig, TenantConfig
from training.profile_store import read_stored
from training.schedule import check_warmup


@dataclass(frozen=True, slots=True)
class DeploymentRequest:
    """What a deployment plan depends on, beside the profile and the lengths."""

    base: BaseModel
    base_model: BaseModelConfig
    tenants: tuple[TenantConfig, ...]
    cluster: ClusterConfig
    planner: PlannerConfig
    activations: ActivationPolicy


def load_profile(config: ProfileConfig, stored: Path, activations: ActivationPolicy) -> Profile:
    """The profile that a run plans with: as `named_profile`, and made for the run's setting of activation recompute.

    Raises ProfileError where it is not: its seconds would be wrong by a forward pass.
    """
    profile = named_profile(config, stored, activations)
    if profile.recompute != activations.recompute:
        theirs, ours = ("full", "none") if profile.recompute else ("none", "full")
        raise ProfileError(
            f"profile {profile.name} has the seconds of activation recompute {theirs!r}, but "
            f"training.activation_recompute is {ours!r}; set it to {theirs!r}, or set profile.source: measure and run "
            "`lobra profile`"
        )
    return profile


def named_profile(config: ProfileConfig, stored: Path, activations: ActivationPolicy = TYPICAL_ACTIVATIONS) -> Profile:
    """The profile that the run file names; `stored` is where a measured one would lie.

    Raises InputError (with the remedy) when a path, preset or measurement is missing.
    """
    match config.source:
        case ProfileSource.FILE:
            if config.path is None:
                raise InputError("profile.path is missing; name a profile file, or set profile.source: preset")
            return read_profile(config.path)
        case ProfileSource.PRESET:
            if config.preset is None:
                raise InputError(f"profile.preset is missing; choose one of {', '.join(preset_names())}")
            return read_preset(config.preset, activations)
        case ProfileSource.MEASURE:
            return read_stored(stored)


def propose(request: DeploymentRequest, profile: Profile) -> Candidates:
    """The parallel configurations that model, memory, cluster and profile allow, and why the others do not."""
    adapters = [tenant.adapter for tenant in request.tenants]
    num_adapter_parameters = sum(request.base.num_adapter_parameters(a.rank, a.target_modules) for a in adapters)
    shape = request.base.shape(request.base_model.dtype)
    return propose_candidates(
        shape, profile, request.cluster, request.planner, num_adapter_parameters, request.activations
    )


def deploy(request: DeploymentRequest, candidates: Candidates, histogram: pl.DataFrame) -> tuple[Phase, ...]:
    """The strategy's phases, each with its deployment plan for the tenants' measured lengths.

    Raises InputError when a tenant's warm-up takes all its steps, PlanInfeasibleError as planning does.
    """
    workload = _workload(request, histogram)
    for tenant, of_tenant in zip(request.tenants, workload.tenants, strict=True):
        check_warmup(tenant, int(of_tenant.counts.sum()))
    return strategy_phases(workload, candidates, request.cluster.num_gpus, request.planner)


def estimate(
    request: DeploymentRequest, candidates: Candidates, histogram: pl.DataFrame, phases: Sequence[Phase]
) -> dict[str, float]:
    """What the whole run will cost each tenant, in GPU seconds (`planning.estimate`)."""
    workload = _workload(request, histogram)
    num_rows = {tenant.name: int(tenant.counts.sum()) for tenant in workload.tenants}
    num_steps = {tenant.name: tenant.num_steps(num_rows[tenant.name]) for tenant in request.tenants}
    return estimated_gpu_seconds(phases, num_steps, workload, candidates.by_config, request.planner)


def split_outcomes(
    outcomes: Sequence[Outcome], allow_failures: bool
) -> tuple[list[PreparedTenant], list[TenantFailure]]:
    """Tenants that can be trained and those that cannot; raises InputError if the failures end the run."""
    prepared = [outcome for outcome in outcomes if isinstance(outcome, PreparedTenant)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, TenantFailure)]
    if failures and not (allow_failures and prepared):
        raise InputError("\n".join(failure.reason for failure in failures))
    return prepared, failures


def _workload(request: DeploymentRequest, histogram: pl.DataFrame) -> Workload:
    return Workload(tuple(_tenant_workload(tenant, histogram) for tenant in request.tenants))


def _tenant_workload(tenant: TenantConfig, histogram: pl.DataFrame) -> TenantWorkload:
    lengths, counts = workload_arrays(histogram, tenant.name)
    return TenantWorkload(tenant.name, lengths, counts, tenant.batch_size)
