"""summary.json: what a run did and cost, from its journal and its plan. DESIGN.md, "Files". No Prefect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from data_prep.prepare import PreparedTenant
from planning.config import Strategy
from planning.phase_file import describe
from planning.strategies import Phase
from training.adapter_probe import ProbeResult
from training.journal import effective_evaluations, effective_steps, overhead_gpu_seconds
from training.progress import TenantStatus

NUM_LOSS_STEPS = 5  # first_loss and last_loss are means over this many steps
SKIPPED = "skipped"  # its data could not be prepared
FAILED = "failed"  # its adapter must not be published


@dataclass(frozen=True, slots=True)
class TenantOutcome:
    """How one tenant ended: trained (with its adapter folder, which passed its probe) or not (with the reason).

    `published_step` counts the tenant's own steps: its last one, or that of its lowest evaluation loss.
    """

    status: str
    adapter_path: str | None = None
    reason: str = ""
    probe: ProbeResult | None = None
    published_step: int | None = None

    @property
    def is_good(self) -> bool:
        return is_success(self.status)


@dataclass(frozen=True, slots=True)
class RunResults:
    """What the summary is made of."""

    strategy: Strategy
    phases: tuple[Phase, ...]
    prepared: tuple[PreparedTenant, ...]
    outcomes: Mapping[str, TenantOutcome]
    records: Sequence[dict[str, Any]]
    estimate: Mapping[str, float]
    """GPU seconds of each trained tenant, as foreseen before the run."""


def summarise(results: RunResults) -> dict[str, Any]:
    """Content of summary.json."""
    steps = effective_steps(results.records)
    num_rejects = {tenant.tenant: tenant.num_rejects for tenant in results.prepared}
    return {
        "schema_version": 1,
        "strategy": results.strategy.value,
        "plan": describe(results.phases),
        "num_gpus": results.phases[0].plan.num_gpus,
        "gap": results.phases[0].plan.gap,
        "steps": len(steps),
        "trained_at": datetime.fromtimestamp(steps[-1]["time"], UTC).isoformat() if steps else None,
        "gpu_seconds": sum(step["gpu_seconds"] for step in steps),
        "overhead_gpu_seconds": overhead_gpu_seconds(results.records),
        "predicted_step_seconds": mean([step["predicted_seconds"] for step in steps]),
        "measured_step_seconds": mean([step["measured_seconds"] for step in steps]),
        "padding_ratio": padding_ratio(steps),
        "imbalance": mean([step["imbalance"] for step in steps]),
        "dispatch_milliseconds": mean([step["dispatch_milliseconds"] for step in steps]),
        "tenants": {
            name: {
                "status": outcome.status,
                "adapter_path": outcome.adapter_path,
                "reason": outcome.reason,
                "probe": None
                if outcome.probe is None
                else {"effect": outcome.probe.effect, "error": outcome.probe.error},
                "published_step": outcome.published_step,
                "num_rejects": num_rejects.get(name, 0),
                **tenant_totals(steps, name),
                "estimated_gpu_seconds": results.estimate.get(name),
                **evaluation_totals(results.records, name),
            }
            for name, outcome in results.outcomes.items()
        },
    }


def tenant_totals(steps: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Tokens, GPU seconds and losses of one tenant over the steps it took part in."""
    own = [step["tenants"][name] for step in steps if name in step["tenants"]]
    losses = [result["loss"] for result in own if result["loss"] is not None]
    return {
        "steps": len(own),
        "tokens": sum(result["num_tokens"] for result in own),
        "gpu_seconds": sum(result["gpu_seconds"] for result in own),
        "first_loss": mean(losses[:NUM_LOSS_STEPS]),
        "last_loss": mean(losses[-NUM_LOSS_STEPS:]),
    }


def evaluation_totals(records: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Evaluation losses of one tenant; nulls where there is none. Steps count the tenant's own."""
    evaluations = [record["tenants"] for record in effective_evaluations(records)]
    own = [tenants[name] for tenants in evaluations if name in tenants]
    finite = [result for result in own if result["loss"] is not None]
    best: dict[str, Any] = min(finite, key=lambda result: result["loss"], default={})
    return {
        "num_evaluations": len(own),
        "last_evaluation_loss": own[-1]["loss"] if own else None,
        "best_evaluation_loss": best.get("loss"),
        "best_evaluation_step": best.get("tenant_step"),
        "best_perplexity": best.get("perplexity"),
    }


def is_success(status: str) -> bool:
    """Whether a tenant of this status was trained to its end, early or not, and has its adapter."""
    return status in {known.value for known in TenantStatus if known.is_success}


def padding_ratio(steps: Sequence[dict[str, Any]]) -> float | None:
    """Padding tokens / computed tokens of all steps together."""
    num_computed = sum(step["num_computed_tokens"] for step in steps)
    return 1.0 - sum(step["num_tokens"] for step in steps) / num_computed if num_computed else None


def skipped(reason: str) -> TenantOutcome:
    """A tenant whose data could not be prepared."""
    return TenantOutcome(SKIPPED, None, reason)


def summary_markdown(summary: Mapping[str, Any]) -> str:
    """Adapters and their cost as a table."""
    rows = [
        f"| {name} | {tenant['status']} | {shown(tenant['first_loss'])} | {shown(tenant['last_loss'])} "
        f"| {shown_evaluation(tenant)} "
        f"| {tenant['tokens']} | {shown_estimate(tenant)} | {tenant['gpu_seconds']:.1f} "
        f"| {tenant['adapter_path'] or tenant['reason']} |"
        for name, tenant in summary["tenants"].items()
    ]
    return "\n".join(
        [
            f"Plan **{summary['plan']}** on {summary['num_gpus']} GPUs: {summary['steps']} steps, "
            f"{summary['gpu_seconds']:.1f} GPU seconds and {summary['overhead_gpu_seconds']:.1f} of overhead.",
            "",
            "| tenant | status | first loss | last loss | evaluation | tokens | estimate | GPU seconds | adapter |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
            *rows,
        ]
    )


def result_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per tenant, for a table that can be sorted."""
    losses = ("first_loss", "last_loss", "best_evaluation_loss", "best_perplexity")
    keys = ("status", "steps", "tokens", "estimated_gpu_seconds", "gpu_seconds", *losses, "num_rejects", "reason")
    return [{"tenant": name, **{key: totals[key] for key in keys}} for name, totals in summary["tenants"].items()]


def shown(loss: float | None) -> str:
    """A loss for a table."""
    return "-" if loss is None else f"{loss:.3f}"


def shown_evaluation(tenant: Mapping[str, Any]) -> str:
    """A tenant's lowest evaluation loss for a table, with its perplexity and the tenant's step; a dash without one."""
    if tenant["best_evaluation_loss"] is None:
        return "-"
    perplexity = "" if tenant["best_perplexity"] is None else f" (perplexity {tenant['best_perplexity']:.4g})"
    return f"{shown(tenant['best_evaluation_loss'])}{perplexity} at step {tenant['best_evaluation_step']}"


def shown_estimate(tenant: Mapping[str, Any]) -> str:
    """A tenant's estimated GPU seconds for a table, and how far they are off what it was charged."""
    estimate, bill = tenant["estimated_gpu_seconds"], tenant["gpu_seconds"]
    if estimate is None:
        return "-"
    return f"{estimate:.1f} ({estimate / bill - 1:+.0%})" if bill else f"{estimate:.1f}"


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    return sum(values) / len(values) if values else None
