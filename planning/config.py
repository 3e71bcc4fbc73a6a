"""The sections of a run file that planning reads, and `Section`, the base of all sections.

Sections are frozen and strict: an unknown key is an error. Defaults are plain values, so that a form can show them.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """One section of the run file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_enum_values=False)


class Backend(StrEnum):
    """Communication library of the fleet; `auto` is NCCL where a GPU is present, else gloo."""

    AUTO = "auto"
    GLOO = "gloo"
    NCCL = "nccl"


class Strategy(StrEnum):
    """How GPUs are shared among tenants: jointly or one tenant after the other, on unequal or on equal replicas."""

    LOBRA = "lobra"
    LOBRA_SEQUENTIAL = "lobra_sequential"
    TASK_FUSED = "task_fused"
    TASK_SEQUENTIAL = "task_sequential"

    @property
    def is_sequential(self) -> bool:
        """One tenant after the other, each on a plan of its own."""
        return self in (Strategy.LOBRA_SEQUENTIAL, Strategy.TASK_SEQUENTIAL)

    @property
    def is_homogeneous(self) -> bool:
        """All replicas equal."""
        return self in (Strategy.TASK_FUSED, Strategy.TASK_SEQUENTIAL)


class Batching(StrEnum):
    """What a chunk holds: sequences padded to one length, or whole sequences end to end up to the token budget."""

    PADDED = "padded"
    PACKED = "packed"


class BucketRule(StrEnum):
    """Padded batching: buckets chosen anew for every step's lengths, or once for the expected lengths."""

    DYNAMIC = "dynamic"
    FIXED = "fixed"


class ProfileSource(StrEnum):
    """Where the cost model comes from: a file, a shipped preset, or a measurement stored by an earlier run."""

    FILE = "file"
    PRESET = "preset"
    MEASURE = "measure"


class ActivationRecompute(StrEnum):
    """What backward finds: all activations of forward, or each layer's input, from which it runs forward again."""

    NONE = "none"
    FULL = "full"


class ClusterConfig(Section):
    """The GPUs reserved for the run. On CPU a rank stands for a GPU."""

    num_gpus: Annotated[int, Field(gt=0, title="GPUs reserved (ranks on CPU)")]
    gpus_per_node: Annotated[int, Field(gt=0, title="GPUs per node; a tensor-parallel group stays on one node")] = 8
    memory_per_gpu_gib: Annotated[float, Field(gt=0, title="Memory per GPU (GiB)")] = 40.0
    backend: Backend = Backend.AUTO


class PlannerConfig(Section):
    """Search space and limits of the deployment plan and of the per-step dispatch."""

    strategy: Strategy = Strategy.LOBRA
    batching: Batching = Batching.PADDED
    bucket_rule: BucketRule = BucketRule.DYNAMIC
    num_buckets: Annotated[int, Field(gt=0, le=256, title="Length buckets per step (padded batching)")] = 16
    max_tp: Annotated[int, Field(gt=0, title="Largest tensor-parallel degree")] = 16
    max_pp: Annotated[int, Field(gt=0, title="Largest pipeline-parallel degree")] = 16
    num_evaluation_batches: Annotated[int, Field(gt=0, title="Sampled batches that rank plans and give the gap")] = 32
    max_search_moves: Annotated[int, Field(ge=0, title="Local-search moves per dispatch")] = 2000
    seed: Annotated[int, Field(ge=0, title="Seed of the planner's sampling")] = 0


class ProfileConfig(Section):
    """Time and memory of each candidate parallel configuration."""

    source: ProfileSource = ProfileSource.FILE
    path: Annotated[Path | None, Field(title="Profile file, for source 'file'")] = None
    preset: Annotated[str | None, Field(title="Name of a shipped profile, for source 'preset'")] = None
