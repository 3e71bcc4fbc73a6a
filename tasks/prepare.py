"""Prefect tasks of data preparation: tenants' files -> token files, and their length histogram."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl
from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from data_prep.histogram import measure_lengths, read_histogram, write_histogram
from data_prep.prepare import Outcome, PreparedTenant, PrepareRequest, TenantFailure, prepare_tenants
from planning.errors import InputError
from tasks.run_folder import RunFolder, read_json, write_json
from training.deployment import split_outcomes

Hashes = tuple[str, str | None]  # of the rows to train on, and of those held out


@task(name="prepare", cache_policy=NO_CACHE)
def prepare(
    requests: Sequence[PrepareRequest], num_workers: int, allow_failures: bool, folder: RunFolder
) -> list[Outcome]:
    """Token files of all tenants, from the cache where their input is unchanged; the manifest goes to prepared.json.

    Raises InputError with every tenant's reason when one fails without `allow_failures`, when none is left, or when a
    resumed run finds other data than it started with.
    """
    logger = get_run_logger()
    outcomes = prepare_tenants(requests, num_workers, lambda outcome: logger.info(describe(outcome)))
    split_outcomes(outcomes, allow_failures)
    if folder.prepared.exists():
        _refuse_other_data(_read_manifest(folder.prepared), outcomes)
    write_json(folder.prepared, {"schema_version": 1, "tenants": [_to_dict(outcome) for outcome in outcomes]})
    return outcomes


@task(name="measure", cache_policy=NO_CACHE)
def measure(prepared: Sequence[PreparedTenant], folder: RunFolder) -> pl.DataFrame:
    """Exact length histogram of every tenant: histogram.parquet and a table on the run page."""
    if folder.histogram.exists():
        return read_histogram(folder.histogram)
    histogram = measure_lengths(prepared)
    write_histogram(histogram, folder.histogram)
    create_table_artifact(length_table(histogram), key="lengths", description="Sequence lengths per tenant (tokens)")
    return histogram


def describe(outcome: Outcome) -> str:
    """One line for a log."""
    if isinstance(outcome, TenantFailure):
        return outcome.reason
    held_out = f", {outcome.num_evaluation_rows} rows held out" if outcome.num_evaluation_rows else ""
    return (
        f"{outcome.tenant}: {outcome.num_rows} rows, {outcome.num_tokens} tokens, {outcome.num_rejects} rejected"
        + held_out
    )


def length_table(histogram: pl.DataFrame) -> list[dict[str, object]]:
    """Per tenant: sequences, mean, median, 99th percentile and longest length."""
    rows = histogram.select("tenant", pl.col("length").repeat_by("count")).explode("length")
    return (
        rows.group_by("tenant", maintain_order=True)
        .agg(
            sequences=pl.len(),
            mean=pl.col("length").mean().round(1),
            median=pl.col("length").median(),
            p99=pl.col("length").quantile(0.99, "nearest"),
            longest=pl.col("length").max(),
        )
        .to_dicts()
    )


def _to_dict(outcome: Outcome) -> dict[str, object]:
    if isinstance(outcome, TenantFailure):
        return {"tenant": outcome.tenant, "failure": outcome.reason}
    return outcome.to_dict()


def _read_manifest(path: Path) -> dict[str, Hashes | None]:
    """Tenant -> SHA-256 of its token file and of its held-out rows, None for a tenant that failed."""
    entries = read_json(path)["tenants"]
    return {
        entry["tenant"]: (entry["sha256"], entry.get("evaluation_sha256")) if "sha256" in entry else None
        for entry in entries
    }


def _refuse_other_data(before: dict[str, Hashes | None], outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        now = (outcome.sha256, outcome.evaluation_sha256) if isinstance(outcome, PreparedTenant) else None
        if before.get(outcome.tenant) != now:
            raise InputError(
                f"tenant {outcome.tenant!r}: its data or the tokenizer changed since this run started; put the "
                "old files back to resume it, or add --fresh to start anew"
            )
