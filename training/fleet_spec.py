"""What a fleet is told at launch, and the names of the messages between controller and ranks.

All messages are JSON values of a key-value store that the controller hosts. Each launch has its own key prefix, so that
ranks of an earlier one can never answer.
"""

from pathlib import Path

from pydantic import Field

from planning.config import Backend, Section
from planning.types import ActivationPolicy, Replica
from training.checkpoint import Checkpoint
from training.config import BaseModelConfig, TenantConfig
from training.request import TrainingRequest

FAILURE_KEY = "failure"  # the first rank that failed says why
DEATH_KEY = "death"  # the agent says which rank was killed: the cause of its peers' failures
HEARTBEAT_KEY = "heartbeat"
SPEC_KEY = "spec"
ABANDON_KEY = "abandon"  # the running step will not be waited for: save the last completed one
HEARTBEAT_SECONDS = 1.0
HEARTBEAT_LOST_SECONDS = 10.0
READY = 0  # number of the first report, before any command


class FleetSpec(Section):
    """Everything a rank needs to build its part of the fleet.

    `evaluation_paths` are the token files of the held-out rows, of tenants that are evaluated.
    `checkpoint` is the folder to continue from, or None for the initial adapters; `num_updates` counts each tenant's
    optimiser updates so far.
    """

    replicas: tuple[Replica, ...]
    base_model: BaseModelConfig
    tenants: tuple[TenantConfig, ...]
    token_paths: dict[str, Path]
    checkpoint: Path | None
    num_updates: dict[str, int]
    backend: Backend
    step_timeout_seconds: float
    log_dir: Path
    evaluation_paths: dict[str, Path] = Field(default_factory=dict)
    activations: ActivationPolicy = ActivationPolicy()
    trace_steps: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        return sum(replica.config.num_gpus for replica in self.replicas)


def fleet_spec_for(
    request: TrainingRequest,
    replicas: tuple[Replica, ...],
    checkpoint: Checkpoint | None,
    num_updates: dict[str, int],
) -> FleetSpec:
    """What the fleet of a training is told when it is launched on `replicas`."""
    return FleetSpec(
        replicas=replicas,
        base_model=request.base_model,
        tenants=request.tenants,
        token_paths=request.token_paths,
        evaluation_paths=request.evaluation_paths,
        checkpoint=checkpoint.folder if checkpoint else None,
        num_updates=num_updates,
        backend=request.cluster.backend,
        step_timeout_seconds=request.training.step_timeout_seconds,
        log_dir=request.files.logs,
        activations=request.training.activations,
        trace_steps=request.training.trace_steps,
    )


def command_key(number: int) -> str:
    return f"command/{number}"


def report_key(number: int, rank: int) -> str:
    return f"report/{number}/{rank}"


def report_keys(number: int, world_size: int) -> list[str]:
    """Those of all ranks, in rank order."""
    return [report_key(number, rank) for rank in range(world_size)]


def saved_key(name: str) -> str:
    """Set when the checkpoint folder `name` has its tensors."""
    return f"saved/{name}"


def log_path(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank-{rank}.log"
