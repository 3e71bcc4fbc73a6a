"""The run file: one YAML that describes a run, read strictly, and the same model as a flow's parameter."""

import difflib
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from data_prep.config import DataConfig
from planning.config import ClusterConfig, PlannerConfig, ProfileConfig, Section
from planning.errors import InputError
from tasks.tracking_config import TrackingConfig
from training.config import BaseModelConfig, TenantConfig, TrainingConfig


class RunConfig(Section):
    """A joint fine-tuning run: base model, tenants, cluster, and how to plan, train and track it."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    base_model: BaseModelConfig
    tenants: Annotated[tuple[TenantConfig, ...], Field(min_length=1)]
    cluster: ClusterConfig
    profile: ProfileConfig
    planner: PlannerConfig = PlannerConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _tenants_differ(self) -> Self:
        names = [tenant.name for tenant in self.tenants]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"tenant {twice[0]!r} is given twice; names must differ")
        return self

    @property
    def default_run_dir(self) -> Path:
        return Path("runs") / self.name


def read_run_file(path: Path) -> RunConfig:
    """Read and validate a run file. Raises InputError that names every wrong key, its value and the remedy."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such run file; write one with `lobra init`") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: a run file is a mapping of sections; write one with `lobra init`")
    try:
        return RunConfig.model_validate(content)
    except ValidationError as error:
        raise InputError("\n".join(f"{path}: {line}" for line in explain(error, RunConfig))) from error


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line per mistake: dotted key, what is wrong, the value given; for an unknown key the nearest known one."""
    lines = []
    for item in error.errors():
        key = _dotted(item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {key}{_suggestion(item['loc'], model)}")
        elif item["type"] == "missing":
            lines.append(f"key {key} is missing")
        else:
            message = item["msg"].removeprefix("Value error, ")
            given = item["input"]
            shown = f" (given: {given!r})" if isinstance(given, str | int | float | bool) else ""
            lines.append(f"{key}: {message}{shown}" if key else message)
    return lines


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _suggestion(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    known = _fields_at(location[:-1], model)
    if not known:
        return ""
    near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known keys: {', '.join(known)}"


def _fields_at(location: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    """Field names of the section at a location, through the tuple of tenants."""
    for part in location:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        inner = [arg for arg in getattr(annotation, "__args__", ()) if isinstance(arg, type)]
        candidates = [kind for kind in (annotation, *inner) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not candidates:
            return []
        model = candidates[0]
    return list(model.model_fields)
