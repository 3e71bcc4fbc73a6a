"""Measured chunk times -> the cost of a layer, with the error of the fit. No torch.

    seconds of a chunk on one stage = layers/pp * f(tp,pp) * (a(tp) + b(tp) * tokens + c(tp) * sum(length^2))

a, b, c are fitted to the measurements of the shortest pipeline of each tp (`planning.layer_fit`); f then minimises the
sum of squared relative errors for each longer one. On two CPU cores f was 0.93 to 1.09
(BENCHMARKS.md): a stage costs about its part of the layers there, but links between GPUs may say otherwise.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planning.config import Batching
from planning.errors import LobraError
from planning.layer_fit import fit_layer_cost, layer_seconds
from planning.profile import LayerCost, Profile
from planning.types import ParallelConfig


@dataclass(frozen=True, slots=True)
class ChunkTiming:
    """One measured chunk: `num_sequences` of `length` tokens on one stage of a configuration.

    `seconds` is the median of the repetitions, `peak_bytes` the largest of any rank above what it held at rest.
    """

    config: ParallelConfig
    num_sequences: int
    length: int
    batching: Batching
    seconds: float
    peak_bytes: int

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.length

    def __str__(self) -> str:
        return f"{self.config} {self.num_sequences} x {self.length} {self.batching}"


@dataclass(frozen=True, slots=True)
class CostFit:
    """Fitted costs, and what each measurement differs from them: `errors[i]` = fitted / measured - 1."""

    layer_cost_by_tp: dict[int, LayerCost]
    stage_factors: dict[ParallelConfig, float]
    timings: tuple[ChunkTiming, ...]
    errors: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        return float(np.mean(np.abs(self.errors)))

    @property
    def max_error(self) -> float:
        return float(np.max(np.abs(self.errors)))

    @property
    def worst(self) -> ChunkTiming:
        return self.timings[int(np.argmax(np.abs(self.errors)))]

    def mean_error_of(self, batching: Batching) -> float | None:
        """Mean absolute relative error of the padded or of the packed chunks; None if there are none."""
        own = [abs(e) for t, e in zip(self.timings, self.errors, strict=True) if t.batching is batching]
        return float(np.mean(own)) if own else None


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """A profile, what it was fitted to, and what the memory model said for each configuration."""

    profile: Profile
    fit: CostFit
    modelled_bytes_per_token: dict[ParallelConfig, float]


def fit_cost(timings: Sequence[ChunkTiming], num_layers: int) -> CostFit:
    """Fit all measurements. Raises LobraError when those of a tp do not grow with the tokens."""
    by_tp: dict[int, dict[ParallelConfig, list[ChunkTiming]]] = defaultdict(lambda: defaultdict(list))
    for timing in timings:
        by_tp[timing.config.tp][timing.config].append(timing)
    layer_cost_by_tp: dict[int, LayerCost] = {}
    stage_factors: dict[ParallelConfig, float] = {}
    for tp, by_config in sorted(by_tp.items()):
        shortest = min(by_config)
        cost = layer_cost_by_tp[tp] = fit_layer_cost(
            *_sizes(by_config[shortest]), _seconds(by_config[shortest]) / (num_layers // shortest.pp)
        )
        if cost.seconds_per_token + cost.seconds_per_token2 == 0:
            raise LobraError(
                f"the measured times of {shortest} do not grow with the tokens; measure on a quieter machine"
            )
        for config, own in sorted(by_config.items()):
            ratios = _stage_seconds(cost, own, num_layers) / _seconds(own)
            stage_factors[config] = 1.0 if config == shortest else float(ratios.sum() / (ratios**2).sum())
    fitted = [
        stage_factors[timing.config] * _stage_seconds(layer_cost_by_tp[timing.config.tp], [timing], num_layers)[0]
        for timing in timings
    ]
    errors = tuple(f / timing.seconds - 1.0 for f, timing in zip(fitted, timings, strict=True))
    return CostFit(layer_cost_by_tp, stage_factors, tuple(timings), errors)


def _stage_seconds(cost: LayerCost, timings: Sequence[ChunkTiming], num_layers: int) -> npt.NDArray[np.float64]:
    return np.array([num_layers // timing.config.pp for timing in timings]) * layer_seconds(cost, *_sizes(timings))


def _sizes(timings: Sequence[ChunkTiming]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Tokens, and sum of length^2, of each chunk."""
    num_tokens = np.array([timing.num_tokens for timing in timings])
    return num_tokens, num_tokens * np.array([timing.length for timing in timings])


def _seconds(timings: Sequence[ChunkTiming]) -> npt.NDArray[np.float64]:
    return np.array([timing.seconds for timing in timings])
