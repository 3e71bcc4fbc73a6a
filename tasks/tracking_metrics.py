"""Which MLflow metrics a step and a summary become. No mlflow here: dictionaries in, dictionaries out.

The names are the same in every run, so that MLflow's compare page lines them up; the part before "/" is the section of
its charts. Values that a record holds as null (a loss that was not finite) are left out.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.names import folder_name

# MLflow allows 250 characters of letters, digits, "_ - . / :" and spaces; the slash separates sections here.
PLAIN_NAME = re.compile(r"\w[\w .-]{0,199}")
TOTAL = "total"


@dataclass(frozen=True, slots=True)
class Point:
    """A run's metrics at one step."""

    step: int
    time_seconds: float
    metrics: Mapping[str, float]


def joint_point(record: Mapping[str, Any]) -> Point:
    """One step of steps.jsonl, for the parent run."""
    return Point(record["step"], record["time"], _joint_metrics(record))


def tenant_point(record: Mapping[str, Any], tenant: str) -> Point:
    """One tenant's part of a step that it is in, for its child run."""
    return Point(record["step"], record["time"], _tenant_metrics(record["tenants"][tenant]))


def joint_evaluation_point(record: Mapping[str, Any]) -> Point:
    """One evaluation of steps.jsonl, for the parent run; its step, the number of steps done, trains from there on."""
    values = {}
    for tenant, result in record["tenants"].items():
        values[f"evaluation_loss/{metric_part(tenant)}"] = result["loss"]
        values[f"evaluation_perplexity/{metric_part(tenant)}"] = result["perplexity"]
    return Point(record["step"], record["time"], _present(values))


def tenant_evaluation_point(record: Mapping[str, Any], tenant: str) -> Point:
    """One tenant's part of an evaluation that it is in, for its child run."""
    result = record["tenants"][tenant]
    values = {"evaluation_loss": result["loss"], "evaluation_perplexity": result["perplexity"]}
    return Point(record["step"], record["time"], _present(values))


def merged(on_disk: Sequence[dict[str, Any]], in_memory: Mapping[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Records in the order of their steps; where both have a step, the one in memory."""
    by_step = {**{record["step"]: record for record in on_disk}, **in_memory}
    return [by_step[step] for step in sorted(by_step)]


def point_batches(points: Sequence[Point], max_metrics: int) -> Iterator[list[Point]]:
    """The points in order, whole, as few batches of at most `max_metrics` metrics; a larger point stands alone."""
    batch: list[Point] = []
    num_metrics = 0
    for point in points:
        if batch and num_metrics + len(point.metrics) > max_metrics:
            yield batch
            batch, num_metrics = [], 0
        batch.append(point)
        num_metrics += len(point.metrics)
    if batch:
        yield batch


def metric_part(tenant: str) -> str:
    """The tenant's part of metric names: its name, or its folder name where MLflow would refuse the name."""
    if PLAIN_NAME.fullmatch(tenant) and tenant != TOTAL:
        return tenant
    return folder_name(tenant)


def summary_metrics(totals: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of summary.json, or of one of its tenants, as `summary/<key>`."""
    numbers = {
        f"summary/{key}": value
        for key, value in totals.items()
        if isinstance(value, int | float) and key != "schema_version"
    }
    return _present(numbers)


def _joint_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    values = {
        "tokens": record["num_tokens"],
        f"gpu_seconds/{TOTAL}": record["gpu_seconds"],
        "padding_ratio": record["padding_ratio"],
        "imbalance": record["imbalance"],
        "predicted_step_seconds": record["predicted_seconds"],
        "measured_step_seconds": record["measured_seconds"],
        "dispatch_milliseconds": record["dispatch_milliseconds"],
        "plan_wait_seconds": record["plan_wait_seconds"],
        "sync_seconds": record["sync_seconds"],
    }
    for tenant, result in record["tenants"].items():
        values[f"loss/{metric_part(tenant)}"] = result["loss"]
        values[f"gpu_seconds/{metric_part(tenant)}"] = result["gpu_seconds"]
    return _present(values)


def _tenant_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    return _present(
        {
            "loss": result["loss"],
            "tokens": result["num_tokens"],
            "gpu_seconds": result["gpu_seconds"],
            "grad_norm": result["grad_norm"],
            "learning_rate": result["learning_rate"],
        }
    )


def _present(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}
