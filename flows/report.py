"""Tables for the terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from flows.preview import Preview
from planning.profile import read_profile
from planning.types import DeploymentPlan
from tasks.comparison import LEGEND, adapters_line, cost_table, loss_table
from tasks.disk import shown_bytes
from tasks.gc import Removal
from tasks.summary import shown, shown_estimate, shown_evaluation
from training.profile_store import read_report


def plan_tables(plan: DeploymentPlan) -> list[Table | str]:
    """A deployment plan: replicas, cost per tenant, alternatives, and what was pruned."""
    replicas = Table("configuration", "replicas", "GPUs", title=f"Plan {plan} on {plan.num_gpus} GPUs")
    for group in plan.groups:
        replicas.add_row(str(group.config), str(group.num_replicas), str(group.num_replicas * group.config.num_gpus))
    if plan.num_used_gpus < plan.num_gpus:
        replicas.add_row("left out", "", str(plan.num_gpus - plan.num_used_gpus))
    tenants = Table("tenant", "GPU seconds per step", title="Predicted cost")
    for name, gpu_seconds in plan.tenant_gpu_seconds.items():
        tenants.add_row(name, f"{gpu_seconds:.3g}")
    headline = (
        f"Predicted step {plan.predicted_step_seconds:.4g} s; no plan can be faster than "
        f"{plan.lower_bound_seconds:.4g} s (gap {plan.gap:.1%}); solved in {plan.solve_seconds:.2f} s."
    )
    tables: list[Table | str] = [replicas, headline, tenants]
    if plan.pruned:
        pruned = Table("configuration", "reason", title="Not usable")
        for item in plan.pruned:
            pruned.add_row(str(item.config), item.reason)
        tables.append(pruned)
    return tables


def profile_tables(stored: Path) -> list[Table | str]:
    """A measured profile: cost per tp, what was measured of every configuration, and the error of the fit."""
    profile, report = read_profile(stored), read_report(stored)
    costs = Table("tp", "ms", "us per token", "ns per token^2", title="Cost of a chunk on one layer")
    for tp, cost in profile.layer_cost_by_tp.items():
        coefficients = (cost.fixed_seconds * 1e3, cost.seconds_per_token * 1e6, cost.seconds_per_token2 * 1e9)
        costs.add_row(str(tp), *(f"{value:.4g}" for value in coefficients))
    columns = ("configuration", "stage factor", "step overhead (ms)", "bytes per token", "memory model says")
    configurations = Table(*columns, title="Measured per configuration")
    for entry in report["configurations"]:
        configurations.add_row(
            f"<{entry['tp']},{entry['pp']}>",
            f"{entry['stage_factor']:.3f}",
            f"{entry['step_overhead_seconds'] * 1e3:.1f}",
            f"{entry['measured_bytes_per_token']:.0f}",
            f"{entry['modelled_bytes_per_token']:.0f}",
        )
    fit = report["fit"]
    error = f"Error of the fit: mean {fit['mean_error']:.1%}, largest {fit['max_error']:.1%} at {fit['worst']}."
    return [costs, configurations, error]


def validation_table(preview: Preview, estimate: Mapping[str, float]) -> Table:
    """Every tenant's rows, tokens, expected cost and rejects, or why it cannot be trained."""
    headings = ("tenant", "rows", "tokens", "GPU seconds", "rejected", "reasons")
    table = Table(*headings, title=f"Run {preview.run.name}")
    for tenant in preview.prepared:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(tenant.reject_reasons.items()))
        counts = (
            str(tenant.num_rows),
            str(tenant.num_tokens),
            f"{estimate[tenant.tenant]:.4g}",
            str(tenant.num_rejects),
        )
        table.add_row(tenant.tenant, *counts, reasons)
    for failure in preview.failures:
        table.add_row(failure.tenant, "-", "-", "-", "-", failure.reason)
    return table


def summary_table(summary: Mapping[str, Any]) -> Table:
    """A finished run: every tenant's losses, tokens, GPU seconds and adapter folder."""
    title = (
        f"Plan {summary['plan']}: {summary['steps']} steps, {summary['gpu_seconds']:.1f} GPU seconds "
        f"(+ {summary['overhead_gpu_seconds']:.1f} overhead)"
    )
    is_evaluated = _is_evaluated(summary["tenants"])
    headings = ("tenant", "status", "loss", *["evaluation"] * is_evaluated, "tokens", "GPU seconds")
    table = Table(*headings, Column("adapter", overflow="fold"), title=title)
    for name, tenant in summary["tenants"].items():
        losses = f"{shown(tenant['first_loss'])} -> {shown(tenant['last_loss'])}"
        cost = f"{tenant['gpu_seconds']:.1f}, estimated {shown_estimate(tenant)}"
        where = tenant["adapter_path"] or tenant["reason"]
        evaluation = [shown_evaluation(tenant)] * is_evaluated
        table.add_row(name, tenant["status"], losses, *evaluation, str(tenant["tokens"]), cost, where)
    return table


def comparison_tables(comparison: Mapping[str, Any]) -> list[Table | str]:
    """A comparison: cost and losses of every variant, and whether the adapters are the same."""
    tables = []
    for headings, *lines in (cost_table(comparison), loss_table(comparison)):
        table = Table(*(Column(heading, overflow="fold") for heading in headings))
        for line in lines:
            table.add_row(*line)
        tables.append(table)
    costs, losses = tables
    return [costs, LEGEND, losses, adapters_line(comparison)]


def removal_tables(removals: Sequence[Removal], dry_run: bool) -> list[Table | str]:
    """What `lobra gc` removed, and how much that frees."""
    total = shown_bytes(sum(removal.num_bytes for removal in removals))
    headline = f"{'Would free' if dry_run else 'Freed'} {total} in {len(removals)} folders."
    if not removals:
        return [headline]
    table = Table(Column("folder", overflow="fold"), "what", "days old", "size")
    for removal in removals:
        table.add_row(str(removal.path), removal.kind, f"{removal.age_days:.1f}", shown_bytes(removal.num_bytes))
    return [table, headline]


def status_tables(status: Mapping[str, Any]) -> list[Table | str]:
    """A run under way."""
    left = status["seconds_left"]
    headline = (
        f"{status['run_dir']}: {status['stage']}, step {status['step']} of {status['num_steps'] or '?'}"
        + (f", about {left:.0f} s left" if left else "")
        + f"; {status['gpu_seconds']:.1f} GPU seconds (+ {status['overhead_gpu_seconds']:.1f} overhead)"
    )
    is_evaluated = _is_evaluated(status["tenants"])
    headings = ("tenant", "status", "steps", "loss", *["evaluation"] * is_evaluated, "tokens", "GPU seconds")
    table = Table(*headings, Column("adapter", overflow="fold"))
    for name, tenant in status["tenants"].items():
        losses = f"{shown(tenant['first_loss'])} -> {shown(tenant['last_loss'])}"
        cost = f"{tenant['gpu_seconds']:.1f}"
        evaluation = [shown_evaluation(tenant)] * is_evaluated
        where = tenant["adapter_path"] or "-"
        table.add_row(
            name, tenant["status"], str(tenant["steps"]), losses, *evaluation, str(tenant["tokens"]), cost, where
        )
    return [headline, table]


def _is_evaluated(tenants: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a table of these tenants needs a column for their evaluations."""
    return any(tenant.get("num_evaluations") for tenant in tenants.values())
