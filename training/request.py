"""What a joint training is asked for, and what it gives back. No torch."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from planning.config import ClusterConfig, PlannerConfig
from planning.strategies import Phase
from planning.types import Candidate
from training.checkpoint import Checkpoint
from training.config import BaseModelConfig, TenantConfig, TrainingConfig
from training.progress import TenantProgress


@dataclass(frozen=True, slots=True)
class TrainingFiles:
    """Where training writes, and the control file that it reads before every step."""

    checkpoints: Path
    steps: Path
    plans: Path
    logs: Path
    control: Path


@dataclass(frozen=True)
class TrainingRequest:
    """Everything one training needs. Phases follow one another; joint strategies have one."""

    files: TrainingFiles
    base_model: BaseModelConfig
    tenants: tuple[TenantConfig, ...]
    token_paths: dict[str, Path]
    phases: tuple[Phase, ...]
    candidates: tuple[Candidate, ...]
    cluster: ClusterConfig
    planner: PlannerConfig
    training: TrainingConfig
    evaluation_paths: dict[str, Path] = field(default_factory=dict)
    """Token files of the held-out rows, of the tenants that have an `evaluation` section."""

    @property
    def identity(self) -> str:
        """Digest of what a checkpoint belongs to, whatever the plan: the base model and the tenants."""
        content = [section.model_dump_json() for section in (self.base_model, *self.tenants)]
        return hashlib.sha256("\n".join(content).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The last checkpoint and how every tenant ended."""

    checkpoint: Checkpoint
    tenants: dict[str, TenantProgress]
