"""The sections of a run file that training reads. No torch: the command line validates with these."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, NonNegativeInt, field_validator, model_validator

from data_prep.config import DatasetConfig
from planning.config import ActivationRecompute, Section
from planning.types import ActivationPolicy

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
ALL_TARGETS = ATTENTION_TARGETS + MLP_TARGETS
EMBEDDINGS = ("lm_head", "embed_tokens")


class DType(StrEnum):
    """Number format of the frozen base model and of activations; adapters are always float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class OnTenantError(StrEnum):
    """What a bad tenant does to the others: end the run, or leave it alone and go on."""

    FAIL = "fail"
    SKIP = "skip"


class Schedule(StrEnum):
    """How the learning rate goes on after warm-up: it stays, or falls to zero at the tenant's last step."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class BaseModelConfig(Section):
    """The frozen model: a local Hugging Face folder with config.json, safetensors and tokenizer."""

    path: Path
    dtype: DType = DType.FLOAT32


class AdapterConfig(Section):
    """Shape of one tenant's LoRA adapter: y += (alpha / rank) * B A x on each target module."""

    rank: Annotated[int, Field(gt=0, title="Rank")]
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False, title="Alpha; the update is scaled by alpha / rank")]
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    initial_adapter: Annotated[Path | None, Field(title="PEFT folder to continue from; empty: a new adapter")] = None

    @field_validator("target_modules")
    @classmethod
    def _known_targets(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        embeddings = [name for name in names if name in EMBEDDINGS]
        if embeddings:
            raise ValueError(
                f"target module {embeddings[0]!r} is not supported: embeddings stay frozen, because a base model may "
                f"tie those of its input and output; choose from {', '.join(ALL_TARGETS)}"
            )
        unknown = [name for name in names if name not in ALL_TARGETS]
        if unknown:
            raise ValueError(f"unknown target module {unknown[0]!r}; choose from {', '.join(ALL_TARGETS)}")
        if not names:
            raise ValueError(f"no target module given; choose from {', '.join(ALL_TARGETS)}")
        if len(set(names)) != len(names):
            raise ValueError("a target module is given twice")
        return tuple(name for name in ALL_TARGETS if name in names)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class OptimiserConfig(Section):
    """AdamW of one tenant. Its step count advances only when the tenant is in a step."""

    learning_rate: Annotated[float, Field(gt=0, le=10, title="Learning rate")] = 2e-4
    schedule: Annotated[Schedule, Field(title="Course of the learning rate after warm-up")] = Schedule.CONSTANT
    warmup_steps: Annotated[int, Field(ge=0, title="Steps over which the learning rate rises from zero")] = 0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    max_grad_norm: Annotated[float | None, Field(gt=0, title="Clip the tenant's gradient norm; empty: no clipping")] = (
        None
    )


class Publish(StrEnum):
    """Which adapter of an evaluated tenant is published: that of its lowest evaluation loss, or of its last step."""

    BEST = "best"
    LAST = "last"


class EvaluationConfig(Section):
    """When a tenant is evaluated on the rows that `dataset.evaluation_ratio` holds out, and what follows from it.

    An evaluation improves if its loss is lower by more than `min_delta` than at the last improvement.
    """

    every: Annotated[int, Field(gt=0, title="Steps between evaluations; the last step is evaluated too")]
    patience: Annotated[
        int | None, Field(gt=0, title="Stop early after so many evaluations without improvement; empty: never")
    ] = None
    min_delta: Annotated[
        float, Field(ge=0, allow_inf_nan=False, title="Smallest decrease of the loss that is an improvement")
    ] = 0.0
    publish: Annotated[Publish, Field(title="Adapter to publish: the best by evaluation loss, or the last")] = (
        Publish.BEST
    )

    @model_validator(mode="after")
    def _min_delta_needs_patience(self) -> Self:
        if self.min_delta and self.patience is None:
            raise ValueError("min_delta has no effect without patience; give patience too, or leave min_delta out")
        return self


class TenantConfig(Section):
    """One fine-tuning task: data set, adapter, optimiser and how long it trains."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    dataset: DatasetConfig
    adapter: AdapterConfig
    optimiser: OptimiserConfig = OptimiserConfig()
    batch_size: Annotated[int, Field(gt=0, title="Sequences per step")]
    steps: Annotated[int | None, Field(gt=0, title="Steps; give steps or epochs")] = None
    epochs: Annotated[int | None, Field(gt=0, title="Passes over the data; give steps or epochs")] = None
    seed: Annotated[int, Field(ge=0, title="Seed of the sample order and of the initial adapter")] = 0
    evaluation: Annotated[EvaluationConfig | None, Field(title="Evaluation while training; empty: none")] = None

    @model_validator(mode="after")
    def _evaluation_needs_rows(self) -> Self:
        if self.evaluation is not None and self.dataset.evaluation_ratio == 0:
            raise ValueError(
                f"tenant {self.name!r}: evaluation needs rows that are held out; set dataset.evaluation_ratio, for "
                "instance to 0.05, or remove evaluation"
            )
        return self

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either steps or epochs")
        if self.steps is not None and self.optimiser.warmup_steps >= self.steps:
            raise ValueError(
                f"optimiser.warmup_steps is {self.optimiser.warmup_steps}, but there are {self.steps} steps; "
                "lower it below that"
            )
        return self

    def num_steps(self, num_rows: int) -> int:
        """Steps this tenant takes part in; an epoch over `num_rows` rows has ceil(num_rows / batch_size) of them."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * -(-num_rows // self.batch_size)


class TrainingConfig(Section):
    """How the fleet trains, independent of any tenant."""

    save_every: Annotated[int, Field(gt=0, title="Steps between checkpoints")] = 10
    keep_checkpoints: Annotated[int, Field(ge=2, title="Checkpoints kept")] = 2
    on_tenant_error: OnTenantError = OnTenantError.FAIL
    max_nonfinite_steps: Annotated[int, Field(gt=0, title="Non-finite updates in a row before quarantine")] = 3
    max_restarts: Annotated[int, Field(ge=0, title="Fleet restarts within a run before it fails")] = 2
    max_gpu_seconds: Annotated[float | None, Field(gt=0, title="Stop, checkpointed, at this many GPU seconds")] = None
    activation_recompute: Annotated[
        ActivationRecompute, Field(title="Recompute activations in backward: longer chunks fit, steps take longer")
    ] = ActivationRecompute.NONE
    sequence_parallel: Annotated[
        bool, Field(title="Split norms and residuals by tokens where tp > 1: longer chunks fit")
    ] = False
    trace_steps: Annotated[
        tuple[NonNegativeInt, ...], Field(title="Steps that every rank records with PyTorch's profiler, into logs/")
    ] = ()
    launch_timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    step_timeout_seconds: Annotated[float, Field(gt=0)] = 1800.0

    @property
    def allows_failures(self) -> bool:
        return self.on_tenant_error is OnTenantError.SKIP

    @property
    def activations(self) -> ActivationPolicy:
        return ActivationPolicy(self.activation_recompute is ActivationRecompute.FULL, self.sequence_parallel)
