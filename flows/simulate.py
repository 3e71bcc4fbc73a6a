"""`lobra simulate`: a run file of length models or histograms instead of data, and the paper's experiments on it.

Reads the file, calls `planning.experiments`, turns the rows into JSON and Markdown. Trains and measures nothing.
"""

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError
from rich.table import Table

from flows.config import explain
from planning.candidates import candidates_of_profile
from planning.config import ClusterConfig, PlannerConfig, PositiveInt, ProfileConfig, Section, Strategy
from planning.errors import InputError
from planning.experiments import (
    ComparedRow,
    ablate,
    compare,
    planner_times,
    sweep_buckets,
    sweep_gpus,
    sweep_tenants,
    two_stage,
)
from planning.length_models import LengthFamily, length_model, modelled_tenant, tenant_from_histogram
from planning.simulation import Scenario, cheapest_gpu_seconds
from planning.types import ParallelConfig, ReplicaGroup
from planning.workload import Workload
from training.deployment import named_profile

HEADINGS = {
    "gpu_seconds_per_step": "GPU s",
    "reduction": "saved %",
    "reduction_against_packed": "vs packed %",
    "padding_ratio": "pad",
    "bound_gpu_seconds_per_step": "bound",
    "num_gpus": "GPUs",
    "num_tenants": "tenants",
}


class Experiment(StrEnum):
    """What a run file compares; the paper's section in brackets."""

    STRATEGIES = "strategies"
    ABLATION = "ablation"
    NUM_BUCKETS = "num_buckets"
    NUM_GPUS = "num_gpus"
    NUM_TENANTS = "num_tenants"
    PLANNER_TIME = "planner_time"
    TWO_STAGE = "two_stage"


class SimulatedTenant(Section):
    """A tenant without data: one of the paper's data sets by its length model, or a histogram file."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    batch_size: PositiveInt
    length_model: Annotated[str | None, Field(title="Data set of the paper; default: the tenant's name")] = None
    histogram: Annotated[Path | None, Field(title="Parquet or CSV file with columns length, count")] = None


class GivenReplicas(Section):
    """Replicas of one configuration in a given plan."""

    tp: PositiveInt
    pp: PositiveInt
    replicas: PositiveInt


class SimulationSection(Section):
    """The experiment and its points."""

    experiment: Experiment = Experiment.STRATEGIES
    length_family: LengthFamily = LengthFamily.GAMMA
    values: Annotated[tuple[PositiveInt, ...], Field(title="Points of a sweep")] = ()
    given_plan: Annotated[tuple[GivenReplicas, ...], Field(title="Replicas to simulate beside the planner's own")] = ()
    steps: Annotated[PositiveInt, Field(title="Simulated steps")] = 100


class SimulationConfig(Section):
    """A run file for planning and simulation alone."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    tenants: Annotated[tuple[SimulatedTenant, ...], Field(min_length=1)]
    cluster: ClusterConfig
    profile: ProfileConfig
    planner: PlannerConfig = PlannerConfig()
    simulation: SimulationSection = SimulationSection()

    @property
    def given_groups(self) -> tuple[ReplicaGroup, ...]:
        given = self.simulation.given_plan
        return tuple(ReplicaGroup(ParallelConfig(group.tp, group.pp), group.replicas) for group in given)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What an experiment gave, as plain data: JSON's content, whose `rows` all have the same keys."""

    content: dict[str, Any]

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.content["rows"]
        return rows

    def to_markdown(self) -> str:
        """A heading that says what it is, and a table."""
        shown = self.content
        caveat = f", {shown['caveat']}" if shown["caveat"] else ""
        title = f"## {shown['name']}: {shown['experiment']} (simulated{caveat})"
        subtitle = f"{shown['num_gpus']} GPUs, {shown['steps']} steps, length model {shown['length_model']}"
        keys = list(self.rows[0])
        lines = [f"| {' | '.join(keys)} |", f"|{' --- |' * len(keys)}"]
        lines += [f"| {' | '.join(_shown(row[key]) for key in keys)} |" for row in self.rows]
        return "\n".join([title, "", subtitle, "", *lines, ""])

    def to_tables(self) -> list[Table]:
        """For the terminal: the numbers, then the plans they belong to, which are long."""
        caveat = f", {self.content['caveat']}" if self.content["caveat"] else ""
        long_keys = [key for key in ("plan", "joint_plan") if key in self.rows[0]]
        keys = [key for key in self.rows[0] if key not in long_keys and self._varies(key)]
        headings = [HEADINGS.get(key, key) for key in keys]
        numbers, plans = Table("#", *headings, title=f"{self.content['name']} (simulated{caveat})"), Table("#", "plan")
        for number, row in enumerate(self.rows, 1):
            numbers.add_row(str(number), *(_shown(row[key]) for key in keys))
            plans.add_row(str(number), *(row[key] for key in long_keys))
        return [numbers, plans]

    def _varies(self, key: str) -> bool:
        return key not in ("num_gpus", "num_tenants") or len({row[key] for row in self.rows}) > 1

    def write(self, folder: Path) -> None:
        """NAME.json and NAME.md in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        name = self.content["name"]
        (folder / f"{name}.json").write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        (folder / f"{name}.md").write_text(self.to_markdown(), encoding="utf-8")


def is_simulation_file(path: Path) -> bool:
    """Whether a run file names no base model: it can be planned and simulated, not trained."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False  # `read_run_file` says what is wrong
    return isinstance(content, dict) and "base_model" not in content and "tenants" in content


def read_simulation_file(path: Path) -> SimulationConfig:
    """Read and validate. Raises InputError that names every wrong key, its value and the remedy."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    try:
        return SimulationConfig.model_validate(content)
    except ValidationError as error:
        raise InputError("\n".join(f"{path}: {line}" for line in explain(error, SimulationConfig))) from error


def chosen_strategies(names: str) -> tuple[Strategy, ...]:
    """The strategies of a comma-separated list; all for an empty one. Raises InputError naming those there are."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in list(Strategy)]
    if unknown:
        raise InputError(f"--strategies: {unknown[0]!r} is unknown; choose from {', '.join(Strategy)}")
    return tuple(Strategy(name) for name in wanted) or tuple(Strategy)


def scenario_of(config: SimulationConfig) -> Scenario:
    """Tenants' lengths and usable configurations. Raises InputError for an unknown model, profile or histogram."""
    family = config.simulation.length_family
    tenants = []
    for seed, tenant in enumerate(config.tenants):
        if tenant.histogram is not None:
            tenants.append(tenant_from_histogram(tenant.name, tenant.histogram, tenant.batch_size))
        else:
            model = length_model(tenant.length_model or tenant.name, family)
            tenants.append(modelled_tenant(tenant.name, model, tenant.batch_size, seed))
    profile = named_profile(config.profile, Path())
    candidates = candidates_of_profile(profile, config.cluster.num_gpus, config.planner)
    return Scenario(Workload(tuple(tenants)), candidates, config.cluster.num_gpus, config.planner)


def run_simulation(config: SimulationConfig, strategies: tuple[Strategy, ...], num_steps: int) -> SimulationResult:
    """The run file's experiment; `strategies` matter where strategies are compared."""
    scenario, given = scenario_of(config), config.given_groups
    values = config.simulation.values
    match config.simulation.experiment:
        case Experiment.STRATEGIES:
            rows = _compared(compare(strategies, scenario, given, num_steps))
        case Experiment.ABLATION:
            rows = _compared(ablate(scenario, given, num_steps))
        case Experiment.NUM_BUCKETS:
            rows = _compared(sweep_buckets(scenario, given, values, num_steps))
        case Experiment.NUM_GPUS:
            rows = _compared(sweep_gpus(_widest(config, scenario), values, num_steps))
        case Experiment.NUM_TENANTS:
            rows = _compared(sweep_tenants(scenario, values, num_steps))
        case Experiment.PLANNER_TIME:
            plans = planner_times(_widest(config, scenario), values)
            rows = [
                {
                    "num_gpus": plan.num_gpus,
                    "plan": str(plan),
                    "solve_seconds": plan.solve_seconds,
                    "predicted_step_seconds": plan.predicted_step_seconds,
                    "lower_bound_seconds": plan.lower_bound_seconds,
                    "gap": 100 * plan.gap,
                }
                for plan in plans
            ]
        case Experiment.TWO_STAGE:
            rows = [
                {
                    "step": step.step,
                    "two_stage_seconds": step.two_stage_seconds,
                    "joint_seconds": step.joint_seconds,
                    "excess": 100 * (step.two_stage_seconds / step.joint_seconds - 1),
                    "joint_plan": step.joint_plan,
                }
                for step in two_stage(scenario, num_steps)
            ]
    return SimulationResult(
        {
            "schema_version": 1,
            "name": config.name,
            "experiment": config.simulation.experiment.value,
            "num_gpus": scenario.num_gpus,
            "steps": num_steps,
            "length_model": config.simulation.length_family.value,
            "caveat": scenario.candidates.caveat,
            "cheapest_gpu_seconds_per_step": {
                "pp=1": cheapest_gpu_seconds(scenario, max_pp=1),
                "all": cheapest_gpu_seconds(scenario),
            },
            "rows": rows,
        }
    )


def _widest(config: SimulationConfig, scenario: Scenario) -> Scenario:
    """The scenario with the configurations that the largest point allows; smaller points drop what does not fit."""
    values = config.simulation.values
    if not values:
        raise InputError(f"simulation.values is empty; experiment {config.simulation.experiment} needs its points")
    profile = named_profile(config.profile, Path())
    candidates = candidates_of_profile(profile, max(*values, scenario.num_gpus), config.planner)
    return Scenario(scenario.workload, candidates, scenario.num_gpus, scenario.planner)


def _compared(rows: list[ComparedRow]) -> list[dict[str, Any]]:
    return [
        {
            "strategy": compared.row.variant.name,
            "batching": compared.row.variant.batching.value,
            "buckets": compared.row.variant.buckets,
            "num_gpus": compared.num_gpus,
            "num_tenants": compared.num_tenants,
            "plan": compared.row.plan,
            "gpu_seconds_per_step": compared.row.gpu_seconds,
            "reduction": 100 * compared.reduction,
            "reduction_against_packed": 100 * compared.reduction_against_packed,
            "padding_ratio": compared.row.padding_ratio,
            "imbalance": compared.row.imbalance,
            "bound_gpu_seconds_per_step": compared.row.bound_gpu_seconds,
        }
        for compared in rows
    ]


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
    return str(value)
