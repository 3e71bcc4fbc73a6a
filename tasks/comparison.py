"""One workload under several strategies: which, what each cost, and the table that says so. No Prefect, no files.

simulated   sum over the steps of the cost model's step seconds x reserved GPUs
measured    sum over the steps of the clock's step seconds x reserved GPUs (overhead stands beside it)
reduction   1 - GPU seconds / those of task_fused under the same batching; simulated and measured each for itself
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planning.config import Batching, BucketRule, PlannerConfig, Strategy
from planning.errors import InputError
from tasks.figure_style import short_number
from tasks.summary import shown

SCHEMA_VERSION = 1
LEGEND = (
    "Same tenants, sequences and reserved GPUs, all steps together, without overhead. Simulated: by the cost model; "
    "measured: by the clock. In brackets: against task_fused under the same batching."
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A strategy with its batching and, if padded, its bucket rule."""

    strategy: Strategy
    batching: Batching
    bucket_rule: BucketRule

    @property
    def name(self) -> str:
        """As a folder and in tables, e.g. `task_fused-padded` or `task_fused-padded-fixed`."""
        is_fixed = self.batching is Batching.PADDED and self.bucket_rule is BucketRule.FIXED
        return f"{self.strategy}-{self.batching}" + ("-fixed" if is_fixed else "")

    def planner(self, planner: PlannerConfig) -> PlannerConfig:
        """The run's planner section under this variant."""
        return planner.model_copy(update=asdict(self))


def read_variants(texts: Sequence[str], planner: PlannerConfig) -> tuple[Variant, ...]:
    """`strategy[:batching[:bucket rule]]` each; what is left out is as in the run's planner section.

    Raises InputError for an unknown word, and when fewer than two different variants are given.
    """
    variants = tuple(_read_variant(text.strip(), planner) for text in texts)
    names = [variant.name for variant in variants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"strategies: {twice[0]} is given twice; name each variant once")
    if len(variants) < 2:
        raise InputError("strategies: give at least two to compare, for instance lobra,task_fused")
    return variants


def _read_variant(text: str, planner: PlannerConfig) -> Variant:
    kinds = (Strategy, Batching, BucketRule)
    values: list[Any] = [planner.strategy, planner.batching, planner.bucket_rule]
    words = text.split(":")
    if len(words) > len(kinds):
        raise InputError(f"strategies: {text!r} has too many parts; write strategy[:batching[:bucket rule]]")
    for number, word in enumerate(words):
        known = [member.value for member in kinds[number]]
        if word not in known:
            raise InputError(f"strategies: {word!r} in {text!r} is unknown; choose from {', '.join(known)}")
        values[number] = kinds[number](word)
    return Variant(*values)


@dataclass(frozen=True, slots=True)
class Row:
    """One variant of a comparison; reductions are None without a task_fused run under the same batching."""

    variant: str
    plan: str
    simulated_gpu_seconds: float
    measured_gpu_seconds: float
    overhead_gpu_seconds: float
    simulated_reduction: float | None
    measured_reduction: float | None
    padding_ratio: float
    imbalance: float
    step_seconds: float
    steps: int
    last_losses: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class AdapterCheck:
    """One tenant's adapters of two variants against the numerics contract."""

    tenant: str
    first: str
    second: str
    max_per_learning_rate: float
    relative: float
    is_within_tolerance: bool


def comparison_rows(variants: Sequence[Variant], summaries: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row per variant, from the summary.json of its run."""
    simulated = [_simulated(summary) for summary in summaries]
    measured = [summary["gpu_seconds"] for summary in summaries]
    rows = []
    for index, (variant, summary) in enumerate(zip(variants, summaries, strict=True)):
        against = _baseline(variant, variants)
        rows.append(
            Row(
                variant=variant.name,
                plan=summary["plan"],
                simulated_gpu_seconds=simulated[index],
                measured_gpu_seconds=measured[index],
                overhead_gpu_seconds=summary["overhead_gpu_seconds"],
                simulated_reduction=None if against is None else 1 - simulated[index] / simulated[against],
                measured_reduction=None if against is None else 1 - measured[index] / measured[against],
                padding_ratio=summary["padding_ratio"],
                imbalance=summary["imbalance"],
                step_seconds=summary["measured_step_seconds"],
                steps=summary["steps"],
                last_losses={name: tenant["last_loss"] for name, tenant in summary["tenants"].items()},
            )
        )
    return rows


def _simulated(summary: Mapping[str, Any]) -> float:
    return float(summary["predicted_step_seconds"] * summary["steps"] * summary["num_gpus"])


def _baseline(variant: Variant, variants: Sequence[Variant]) -> int | None:
    """Index of task_fused under the same batching, with the same bucket rule if there are two of them."""
    fused = [
        index
        for index, other in enumerate(variants)
        if other.strategy is Strategy.TASK_FUSED and other.batching is variant.batching
    ]
    same = [index for index in fused if variants[index].bucket_rule is variant.bucket_rule]
    return next(iter(same or fused), None)


def comparison_to_dict(name: str, rows: Sequence[Row], checks: Sequence[AdapterCheck]) -> dict[str, Any]:
    """Content of comparison.json."""
    return {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "variants": [asdict(row) for row in rows],
        "adapters": [asdict(check) for check in checks],
        "adapters_within_tolerance": all(check.is_within_tolerance for check in checks),
    }


def cost_table(comparison: Mapping[str, Any]) -> list[list[str]]:
    """Headings, then a line per variant: its GPU seconds with the reduction in brackets, and where they went."""
    lines = [["variant", "simulated GPU s", "measured GPU s", "padding", "imbalance", "s/step"]]
    for row in comparison["variants"]:
        lines.append(
            [
                row["variant"],
                _with_reduction(row["simulated_gpu_seconds"], row["simulated_reduction"]),
                _with_reduction(row["measured_gpu_seconds"], row["measured_reduction"]),
                f"{row['padding_ratio']:.1%}",
                f"{row['imbalance']:.1%}",
                short_number(row["step_seconds"]),
            ]
        )
    return lines


def loss_table(comparison: Mapping[str, Any]) -> list[list[str]]:
    """Headings, then a line per variant: its plan, its steps and every tenant's last loss."""
    tenants = list(comparison["variants"][0]["last_losses"])
    lines = [["variant", "plan", "steps", *tenants]]
    for row in comparison["variants"]:
        losses = [shown(row["last_losses"][tenant]) for tenant in tenants]
        lines.append([row["variant"], row["plan"], str(row["steps"]), *losses])
    return lines


def adapters_line(comparison: Mapping[str, Any]) -> str:
    """Whether all variants gave the same adapters, with the largest differences."""
    checks = comparison["adapters"]
    if not checks:
        return "No tenant finished in two variants, so no adapters were compared."
    worst = max(checks, key=lambda check: check["relative"])
    largest = max(check["max_per_learning_rate"] for check in checks)
    num_bad = sum(not check["is_within_tolerance"] for check in checks)
    verdict = "all within tolerance" if not num_bad else f"{num_bad} OUTSIDE the tolerance"
    return (
        f"Adapters: {len(checks)} pairs compared, {verdict} (largest difference {largest:.1e} x learning rate of 2e-02 "
        f"allowed; update differs by {worst['relative']:.1e} of 1e-04, {worst['tenant']}: {worst['first']} and "
        f"{worst['second']})."
    )


def comparison_markdown(comparison: Mapping[str, Any]) -> str:
    """Both tables, the verdict on the adapters, and what the columns mean."""
    return "\n".join(
        [
            f"# {comparison['name']}: strategies compared",
            "",
            *_markdown_table(cost_table(comparison)),
            "",
            LEGEND,
            "",
            *_markdown_table(loss_table(comparison)),
            "",
            adapters_line(comparison),
            "",
        ]
    )


def _markdown_table(lines: Sequence[Sequence[str]]) -> list[str]:
    headings, *cells = lines
    escaped = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in line] for line in cells]
    return ["| " + " | ".join(line) + " |" for line in (headings, ["---"] * len(headings), *escaped)]


def _with_reduction(gpu_seconds: float, reduction: float | None) -> str:
    return short_number(gpu_seconds) + (f" ({-reduction:+.1%})" if reduction else "")
