"""Prefect task that trains: it runs the controller itself, in the flow's own thread, for as long as training lasts.

Called directly, never submitted: a cancelled flow then interrupts it, and the fleet ends with it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID

from prefect import get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tasks.tracking import Tracker
from training.controller import TrainingRequest, TrainingResult
from training.controller import train as train_jointly

ARTIFACT_SECONDS = 5.0  # a progress update is an event on the server


@task(name="train", cache_policy=NO_CACHE)
def train(request: TrainingRequest, tracker: Tracker) -> TrainingResult:
    """Joint training of all tenants, from the newest checkpoint if there is one."""
    logger = get_run_logger()
    with _progress() as advance:

        def observe(record: dict) -> None:
            if record["event"] == "step":
                advance(record)
            else:
                logger.info("%s at step %s", record["event"], record.get("step", "-"))
            tracker.log_step(record)

        return train_jointly(request, observe)


@contextmanager
def _progress() -> Iterator[Callable[[dict], None]]:
    """Shows every step on the terminal, and every few seconds on the run page."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[losses]}"),
    )
    artifact: UUID | None = None
    updated = 0.0
    with Progress(*columns) as bar:
        line = bar.add_task("training", total=None, losses="")

        def advance(record: dict) -> None:
            nonlocal artifact, updated
            losses = " ".join(
                f"{name} {result['loss']:.3f}"
                for name, result in record["tenants"].items()
                if result["loss"] is not None
            )
            bar.update(line, total=record["num_steps"], completed=record["step"] + 1, losses=losses)
            if time.monotonic() - updated < ARTIFACT_SECONDS:
                return
            updated = time.monotonic()
            percent = 100.0 * (record["step"] + 1) / record["num_steps"]
            if artifact is None:
                artifact = create_progress_artifact(percent, key="training", description="Steps trained (%)")
            else:
                update_progress_artifact(artifact, percent)

        yield advance
