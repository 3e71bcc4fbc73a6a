"""What one layer of a base model costs on some hardware, and the profile that says so for every configuration."""

from dataclasses import dataclass, field

from planning.types import ParallelConfig


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds of a chunk on one layer: `fixed_seconds + seconds_per_token * tokens + seconds_per_token2 * sum(l^2)`."""

    fixed_seconds: float
    seconds_per_token: float
    seconds_per_token2: float


@dataclass(frozen=True, slots=True)
class MeasuredConfig:
    """What was measured of one configuration beside its layers' cost; the defaults stand for what was not.

    `stage_factor` = seconds of a chunk on one stage / (layers of the stage x their cost). `step_overhead_seconds` is
    what a step takes beside forward and backward. `bytes_per_token` is the peak of a GPU above what it holds at rest.
    """

    stage_factor: float = 1.0
    step_overhead_seconds: float = 0.0
    bytes_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """Cost per layer and tensor-parallel degree, and, where measured, the largest chunk per configuration.

    With `max_chunk_tokens` only the configurations it lists exist; without it the memory model decides.
    `boundary_seconds_per_token` is what handing a token over between pipeline stages, both ways, adds to every stage
    of a pipeline. `caveat` is not empty where the numbers were not measured: it is shown with every plan. `recompute`
    says whether the seconds are those of activation recompute.
    """

    name: str
    source: str
    num_layers: int
    layer_cost_by_tp: dict[int, LayerCost]
    max_chunk_tokens: dict[ParallelConfig, int] | None = None
    boundary_seconds_per_token: float = 0.0
    caveat: str = ""
    measured: dict[ParallelConfig, MeasuredConfig] = field(default_factory=dict)
    recompute: bool = False
