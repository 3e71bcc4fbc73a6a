"""A run without Prefect, up to its plan: what `lobra validate` and `lobra plan` show. No torch, no MLflow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.histogram import measure_lengths
from data_prep.prepare import Outcome, PreparedTenant, PrepareRequest, TenantFailure, prepare_tenants
from flows.config import RunConfig
from planning.candidates import Candidates
from planning.strategies import Phase
from training.base_model import BaseModel, read_base_model
from training.deployment import DeploymentRequest, deploy, estimate, load_profile, propose, split_outcomes
from training.profile_store import profile_identity, stored_path


@dataclass(frozen=True, slots=True)
class Preview:
    """What is known of a run before it starts: prepared tenants, failures, usable configurations."""

    run: RunConfig
    base: BaseModel
    prepared: tuple[PreparedTenant, ...]
    failures: tuple[TenantFailure, ...]
    candidates: Candidates

    @property
    def request(self) -> DeploymentRequest:
        return deployment_request(self.run, self.base, [tenant.tenant for tenant in self.prepared])

    def plan(self) -> tuple[Phase, ...]:
        """The phases that the run would train, with their deployment plans."""
        return deploy(self.request, self.candidates, measure_lengths(self.prepared))

    def estimate(self, phases: Sequence[Phase]) -> dict[str, float]:
        """GPU seconds that the run would cost each tenant."""
        return estimate(self.request, self.candidates, measure_lengths(self.prepared), phases)


def preview(run: RunConfig, base: BaseModel, on_done: Callable[[Outcome], None] | None = None) -> Preview:
    """Prepare every tenant and propose configurations. Raises InputError as the run itself would."""
    profile = load_profile(run.profile, stored_profile_path(run), run.training.activations)
    rejects_dir = run.data.cache_dir / "preview" / run.name
    outcomes = prepare_tenants(prepare_requests(run, base, rejects_dir), run.data.num_workers, on_done)
    prepared, failures = split_outcomes(outcomes, run.training.allows_failures)
    request = deployment_request(run, base, [tenant.tenant for tenant in prepared])
    return Preview(run, base, tuple(prepared), tuple(failures), propose(request, profile))


def prepare_requests(run: RunConfig, base: BaseModel, run_dir: Path) -> list[PrepareRequest]:
    """One request per tenant; rows longer than the base model's positions count as over-long."""
    requests = []
    for tenant in run.tenants:
        limit = tenant.dataset.max_length or base.max_positions
        dataset = tenant.dataset.model_copy(update={"max_length": limit})
        requests.append(PrepareRequest(tenant.name, dataset, run.base_model.path, run.data.cache_dir, run_dir))
    return requests


def deployment_request(run: RunConfig, base: BaseModel, names: Sequence[str]) -> DeploymentRequest:
    """What the plan of the tenants called `names` depends on."""
    tenants = tuple(tenant for tenant in run.tenants if tenant.name in set(names))
    return DeploymentRequest(base, run.base_model, tenants, run.cluster, run.planner, run.training.activations)


def stored_profile_path(run: RunConfig) -> Path:
    """Where a profile that this machine measures for the run is kept: per model, fleet size and setting."""
    base = read_base_model(run.base_model)
    identity = profile_identity(base, run.base_model, run.tenants, run.cluster, run.training.activations)
    return stored_path(run.data.cache_dir / "profiles", run.base_model, identity)
