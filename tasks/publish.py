"""Prefect task that ends a run: PEFT folders, figures, summary.json, and all of it in MLflow."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from prefect import task
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_table_artifact,
)
from prefect.cache_policies import NO_CACHE

from data_prep.prepare import Outcome
from planning.config import Strategy
from planning.step_plan import StepPlan
from planning.strategies import Phase
from tasks.adapters import publish_staged, published_probe, stage_adapter
from tasks.figures import balance_figure, gpu_seconds_figure, loss_figure, padding_figure, plan_figure
from tasks.length_figure import histogram_figure
from tasks.report import write_report
from tasks.run_folder import RunFolder, read_json, write_json
from tasks.run_page import figure_markdown
from tasks.send import send_results
from tasks.summary import FAILED, RunResults, TenantOutcome, result_rows, skipped, summarise, summary_markdown
from tasks.tracking import Tracker
from training.adapter_probe import ProbeResult
from training.config import BaseModelConfig, TenantConfig
from training.deployment import split_outcomes
from training.journal import effective_evaluations, effective_steps, read_journal
from training.peft_export import ExportError
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
    """Export and probe the adapters, draw, log, and last write summary.json: a folder that has it is finished."""
    prepared, failures = split_outcomes(request.outcomes, allow_failures=True)
    tenants = publish_adapters(request, folder)
    tenants |= {failure.tenant: skipped(failure.reason) for failure in failures}
    records = read_journal(folder.steps)
    summary = summarise(
        RunResults(
            strategy=request.strategy,
            phases=request.phases,
            prepared=tuple(prepared),
            outcomes=tenants,
            records=records,
            estimate=read_json(folder.estimate)["gpu_seconds"],
        )
    )
    draw_figures(request.histogram, request.phases, records, folder)
    write_report(summary, folder)
    send_results(summary, request.tenants, request.base_model, folder, tracker)
    create_artifacts(summary, folder, tracker)
    write_json(folder.summary, summary)
    return summary


def create_artifacts(summary: Mapping[str, Any], folder: RunFolder, tracker: Tracker) -> None:
    """What the run page shows of the result; the link to MLflow only where a tracking server has pages."""
    create_markdown_artifact(summary_markdown(summary), key="result", description="Adapters and GPU seconds")
    create_table_artifact(result_rows(summary), key="tenants", description="Every tenant's status, losses and cost")
    balance = figure_markdown(folder.figures / "balance.png", "Busy time per replica and step")
    create_markdown_artifact(balance, key="balance", description="Busy time per replica and step")
    create_link_artifact(folder.report.resolve().as_uri(), "report.html", key="report", description="The run's report")
    if tracker.parent_url is not None:
        create_link_artifact(tracker.parent_url, "MLflow", key="mlflow", description="The run in MLflow")


def draw_figures(
    histogram: pl.DataFrame, phases: Sequence[Phase], records: Sequence[dict[str, Any]], folder: RunFolder
) -> None:
    """The figures of a run, as PNG files."""
    figures, steps = folder.figures, effective_steps(records)
    figures.mkdir(parents=True, exist_ok=True)
    plans = list({str(phase.plan): phase.plan for phase in phases}.values())
    for number, plan in enumerate(plans, 1):
        plan_figure(plan, figures / ("plan.png" if len(plans) == 1 else f"plan-{number}.png"))
    borders = phases[0].plan.bucket_uppers or last_borders(folder.step_plans)
    histogram_figure(histogram, borders if len(phases) == 1 else (), figures / "lengths.png")
    loss_figure(steps, figures / "losses.png", effective_evaluations(records))
    balance_figure(steps, figures / "balance.png")
    padding_figure(steps, figures / "padding.png")
    gpu_seconds_figure(steps, figures / "gpu_seconds.png")


def last_borders(step_plans: Path) -> list[int]:
    """Lengths (tokens) that sequences were padded to in the last step; none where chunks are packed."""
    last = StepPlan.from_json(read_journal(step_plans)[-1]["plan"])
    jobs = [job for wave in last.waves for job in wave.jobs]
    padded = {chunk.padded_tokens for job in jobs for member in job.members for chunk in member.chunks}
    return sorted(length for length in padded if length is not None)


def publish_adapters(request: PublishRequest, folder: RunFolder) -> dict[str, TenantOutcome]:
    """A probed PEFT folder for every tenant that was trained to its end, unless it was published while others trained.

    The outcome of every tenant; an adapter that fails its probe is taken away again.
    """
    checkpoint, outcomes, staged = request.result.checkpoint, {}, []
    for tenant in request.tenants:
        progress = request.result.tenants[tenant.name]
        if not progress.status.is_success:
            outcomes[tenant.name] = TenantOutcome(progress.status.value, None, progress.reason)
        elif (probe := published_probe(tenant.name, checkpoint, folder)) is not None:
            outcomes[tenant.name] = _published(tenant, request, folder, probe)
        else:
            try:
                staged.append(stage_adapter(tenant, checkpoint, request.base_model, folder))
            except ExportError as error:
                outcomes[tenant.name] = TenantOutcome(FAILED, None, str(error))
    by_name = {tenant.name: tenant for tenant in request.tenants}
    for name, result in publish_staged(staged, request.base_model, folder).items():
        if result.has_passed:
            outcomes[name] = _published(by_name[name], request, folder, result)
        else:
            outcomes[name] = TenantOutcome(FAILED, None, result.reason, result)
    shutil.rmtree(folder.staging, ignore_errors=True)
    return {tenant.name: outcomes[tenant.name] for tenant in request.tenants}


def _published(tenant: TenantConfig, request: PublishRequest, folder: RunFolder, probe: ProbeResult) -> TenantOutcome:
    progress = request.result.tenants[tenant.name]
    path, step = str(folder.adapter(tenant.name)), progress.published_step(tenant.evaluation)
    return TenantOutcome(progress.status.value, path, progress.reason, probe, step)
