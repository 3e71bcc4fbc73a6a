"""Prefect task that ends a run: PEFT folders, figures, summary.json, and all of it in MLflow."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from data_prep.prepare import Outcome
from planning.config import Strategy
from planning.strategies import Phase
from tasks.figures import balance_figure, gpu_seconds_figure, histogram_figure, loss_figure, plan_figure
from tasks.run_folder import RunFolder, write_json
from tasks.summary import FAILED, RunResults, TenantOutcome, skipped, summarise, summary_markdown
from tasks.tracking import Tracker
from training.config import BaseModelConfig, TenantConfig
from training.deployment import split_outcomes
from training.journal import effective_steps, read_journal
from training.peft_export import ExportError, export_adapter
from training.progress import TenantStatus
from training.request import TrainingResult


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """Everything a finished training left behind. `tenants` are those that were trained."""

    strategy: Strategy
    base_model: BaseModelConfig
    tenants: tuple[TenantConfig, ...]
    phases: tuple[Phase, ...]
    outcomes: Sequence[Outcome]
    histogram: pl.DataFrame
    result: TrainingResult


@task(name="publish", cache_policy=NO_CACHE)
def publish(request: PublishRequest, folder: RunFolder, tracker: Tracker) -> dict[str, Any]:
    """Export the adapters, draw, log, and last of all write summary.json: a folder that has it is finished."""
    prepared, failures = split_outcomes(request.outcomes, allow_failures=True)
    tenants = {tenant.name: _export(tenant, request, folder) for tenant in request.tenants}
    tenants |= {failure.tenant: skipped(failure.reason) for failure in failures}
    records = read_journal(folder.steps)
    summary = summarise(RunResults(request.strategy, request.phases, tuple(prepared), tenants, records))
    for figure in draw_figures(request.histogram, request.phases, effective_steps(records), folder.figures):
        tracker.log_figure(figure)
    for tenant, outcome in tenants.items():
        if outcome.adapter_path is not None:
            tracker.log_artifact_dir(tenant, Path(outcome.adapter_path), "adapter")
    tracker.log_summary(summary)
    create_markdown_artifact(summary_markdown(summary), key="result", description="Adapters and GPU seconds")
    write_json(folder.summary, summary)
    return summary


def draw_figures(
    histogram: pl.DataFrame, phases: Sequence[Phase], steps: Sequence[dict[str, Any]], folder: Path
) -> list[Path]:
    """The figures of a run, as PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    plans = list({str(phase.plan): phase.plan for phase in phases}.values())
    plan_paths = [folder / ("plan.png" if len(plans) == 1 else f"plan-{n}.png") for n in range(1, len(plans) + 1)]
    names = ("lengths", "losses", "balance", "gpu_seconds")
    lengths, losses, balance, gpu_seconds = (folder / f"{name}.png" for name in names)
    histogram_figure(histogram, (), lengths)
    for plan, path in zip(plans, plan_paths, strict=True):
        plan_figure(plan, path)
    loss_figure(steps, losses)
    gpu_seconds_figure(steps, gpu_seconds)
    balance_figure(steps, balance)
    return [lengths, *plan_paths, losses, balance, gpu_seconds]


def _export(tenant: TenantConfig, request: PublishRequest, folder: RunFolder) -> TenantOutcome:
    progress = request.result.tenants[tenant.name]
    if progress.status is not TenantStatus.FINISHED:
        return TenantOutcome(progress.status.value, None, progress.reason)
    try:
        path = export_adapter(request.result.checkpoint, request.base_model, tenant, folder.adapter(tenant.name))
    except ExportError as error:
        return TenantOutcome(FAILED, None, str(error))
    return TenantOutcome(progress.status.value, str(path))
