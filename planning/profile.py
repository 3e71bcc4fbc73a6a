"""Profiles: what one layer of the base model costs on this hardware, per tensor-parallel degree.

    milliseconds of a chunk on one layer, forward and backward = a + b * tokens + c * sum(length^2)

A stage of a pipeline costs its layers times that, times a measured factor (embedding, logits and the passing on of
activations). All seconds are with or without activation recompute. A profile is a JSON file (`schema_version` 1).
Shipped ones are presets. This module neither measures nor fits.
"""

from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from planning.analytic import TYPICAL_ACTIVATIONS, analytic_presets, analytic_profile
from planning.config import ActivationRecompute, PositiveInt, Section
from planning.errors import ProfileError
from planning.layer_cost import LayerCost, MeasuredConfig, Profile
from planning.types import ActivationPolicy, ParallelConfig

Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
__all__ = ["LayerCost", "MeasuredConfig", "Profile", "preset_names", "read_preset", "read_profile", "write_profile"]

NOT_PROFILES = {"lengths"}
PRESET_FOLDER = resources.files("planning") / "presets"


class _Coefficients(Section):
    a_ms: Milliseconds
    b_ms_per_token: Milliseconds
    c_ms_per_token2: Milliseconds


class _LargestChunk(Section):
    tp: PositiveInt
    pp: PositiveInt
    tokens: PositiveInt


class _Measured(Section):
    tp: PositiveInt
    pp: PositiveInt
    stage_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    step_overhead_ms: Milliseconds
    bytes_per_token: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _ProfileFile(Section):
    schema_version: Literal[1]
    model: str = ""
    gpu: str = ""
    source: str
    caveat: str = ""
    activation_recompute: ActivationRecompute = ActivationRecompute.NONE
    boundary_ms_per_token: Milliseconds = 0.0
    chunk_ms_per_layer: Literal["a + b*tokens + c*sum(length^2)"]
    num_layers: PositiveInt
    coefficients_by_tp: Annotated[dict[PositiveInt, _Coefficients], Field(min_length=1)]
    max_chunk_tokens: tuple[_LargestChunk, ...] | None = None
    measured: tuple[_Measured, ...] | None = None


def read_profile(path: Path) -> Profile:
    """The profile in a JSON file; its name is the file's stem. Raises ProfileError naming file, field and remedy."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"profile {path} cannot be read: {error}; check profile.path") from error
    return _parse(text, path.stem, str(path))


def read_preset(name: str, activations: ActivationPolicy = TYPICAL_ACTIVATIONS) -> Profile:
    """A shipped profile: measured, or of the analytic model, which is made for `activations`.

    Raises ProfileError naming the presets there are.
    """
    if name in analytic_presets():
        return analytic_profile(name, activations)
    if name not in preset_names():
        raise ProfileError(f"profile.preset {name!r} is not shipped; choose from {', '.join(preset_names())}")
    return _parse((PRESET_FOLDER / f"{name}.json").read_text(encoding="utf-8"), name, f"preset {name}")


def preset_names() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted."""
    files = (entry.name[:-5] for entry in PRESET_FOLDER.iterdir() if entry.name.endswith(".json"))
    return tuple(sorted({*files, *analytic_presets()} - NOT_PROFILES))


def _parse(text: str, name: str, where: str) -> Profile:
    try:
        file = _ProfileFile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "(whole file)"
        raise ProfileError(
            f"profile {where}: field {field}: {first['msg']}; correct the field or measure the profile again"
        ) from error
    layer_cost_by_tp = {
        tp: LayerCost(cost.a_ms / 1e3, cost.b_ms_per_token / 1e3, cost.c_ms_per_token2 / 1e3)
        for tp, cost in file.coefficients_by_tp.items()
    }
    free = [tp for tp, cost in layer_cost_by_tp.items() if cost.seconds_per_token + cost.seconds_per_token2 == 0]
    if free:
        raise ProfileError(
            f"profile {where}: field coefficients_by_tp.{free[0]}: tokens cost nothing (b and c are both 0); "
            "correct the field or measure the profile again"
        )
    return Profile(
        name=name,
        source=file.source,
        num_layers=file.num_layers,
        layer_cost_by_tp=layer_cost_by_tp,
        max_chunk_tokens=_largest_chunks(file, where),
        boundary_seconds_per_token=file.boundary_ms_per_token / 1e3,
        caveat=file.caveat,
        measured={
            ParallelConfig(entry.tp, entry.pp): MeasuredConfig(
                entry.stage_factor, entry.step_overhead_ms / 1e3, entry.bytes_per_token
            )
            for entry in file.measured or ()
        },
        recompute=file.activation_recompute is ActivationRecompute.FULL,
    )


def _largest_chunks(file: _ProfileFile, where: str) -> dict[ParallelConfig, int] | None:
    if file.max_chunk_tokens is None:
        return None
    largest: dict[ParallelConfig, int] = {}
    for row, entry in enumerate(file.max_chunk_tokens):
        config = ParallelConfig(entry.tp, entry.pp)
        if config in largest:
            raise ProfileError(f"profile {where}: field max_chunk_tokens.{row}: {config} stands twice; delete one")
        largest[config] = entry.tokens
    return largest


def write_profile(profile: Profile, path: Path) -> None:
    """The JSON form of a profile, such that `read_profile` gives it back."""
    largest = profile.max_chunk_tokens
    file = _ProfileFile(
        schema_version=1,
        model=profile.name,
        source=profile.source,
        caveat=profile.caveat,
        activation_recompute=ActivationRecompute.FULL if profile.recompute else ActivationRecompute.NONE,
        boundary_ms_per_token=profile.boundary_seconds_per_token * 1e3,
        chunk_ms_per_layer="a + b*tokens + c*sum(length^2)",
        num_layers=profile.num_layers,
        coefficients_by_tp={
            tp: _Coefficients(
                a_ms=cost.fixed_seconds * 1e3,
                b_ms_per_token=cost.seconds_per_token * 1e3,
                c_ms_per_token2=cost.seconds_per_token2 * 1e3,
            )
            for tp, cost in profile.layer_cost_by_tp.items()
        },
        max_chunk_tokens=largest and tuple(_LargestChunk(tp=c.tp, pp=c.pp, tokens=t) for c, t in largest.items()),
        measured=tuple(
            _Measured(
                tp=config.tp,
                pp=config.pp,
                stage_factor=entry.stage_factor,
                step_overhead_ms=entry.step_overhead_seconds * 1e3,
                bytes_per_token=entry.bytes_per_token,
            )
            for config, entry in profile.measured.items()
        )
        or None,
    )
    path.write_text(file.model_dump_json(indent=1, exclude_none=True) + "\n", encoding="utf-8")
