"""Prefect task that trains: it runs the controller itself, in the flow's own thread, for as long as training lasts.

Called directly, never submitted: a cancelled flow then interrupts it, and the fleet ends with it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from prefect import get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tasks.early_publication import EarlyPublisher
from tasks.run_folder import RunFolder
from tasks.tracking import Tracker
from training.controller import train as train_jointly
from training.request import TrainingRequest, TrainingResult

ARTIFACT_SECONDS = 5.0  # a progress update is an event on the server


Record = dict[str, Any]


@task(name="train", cache_policy=NO_CACHE)
def train(request: TrainingRequest, folder: RunFolder, tracker: Tracker) -> TrainingResult:
    """Joint training of all tenants, from the newest checkpoint if there is one; who ends first is published then."""
    logger = get_run_logger()
    publisher = EarlyPublisher(request.base_model, request.tenants, folder, logger.info)
    with publisher, _progress() as advance:

        def observe(record: Record) -> None:
            if record["event"] == "step":
                advance(record)
            elif record["event"] == "evaluation":
                logger.info("evaluation after step %s: %s", record["step"], _evaluations(record))
            else:
                logger.info("%s at step %s", record["event"], record.get("step", "-"))
            tracker.log_step(record)

        return train_jointly(request, observe, publisher.take)


@contextmanager
def _progress() -> Iterator[Callable[[Record], None]]:
    """Shows every step on the terminal, and every few seconds on the run page."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[losses]}"),
    )
    page = _ProgressArtifact()
    with Progress(*columns) as bar:
        line = bar.add_task("training", total=None, losses="")

        def advance(record: Record) -> None:
            done = record["step"] + 1
            bar.update(line, total=record["num_steps"], completed=done, losses=_losses(record))
            page.show(100.0 * done / record["num_steps"])

        yield advance


class _ProgressArtifact:
    """A bar on the run page."""

    def __init__(self) -> None:
        self._artifact_id: UUID | None = None
        self._shown = 0.0

    def show(self, percent: float) -> None:
        if time.monotonic() - self._shown < ARTIFACT_SECONDS and percent < 100.0:
            return
        self._shown = time.monotonic()
        if self._artifact_id is None:
            created = create_progress_artifact(percent, key="training", description="Steps trained (%)")
            assert isinstance(created, UUID)  # a coroutine only in an async flow
            self._artifact_id = created
        else:
            update_progress_artifact(self._artifact_id, percent)


def _losses(record: Record) -> str:
    known = {name: result["loss"] for name, result in record["tenants"].items() if result["loss"] is not None}
    return " ".join(f"{name} {loss:.3f}" for name, loss in known.items())


def _evaluations(record: Record) -> str:
    shown = []
    for name, result in record["tenants"].items():
        loss, perplexity = result["loss"], result["perplexity"]
        text = "not finite" if loss is None else f"loss {loss:.4f}"
        shown.append(f"{name} {text}" + ("" if perplexity is None else f", perplexity {perplexity:.4g}"))
    return "; ".join(shown)
