"""Sends a finished run to MLflow once more: for what a tracking server that was away has missed."""

from pathlib import Path

from flows.config import RunConfig
from flows.finetune import identity, resolved
from planning.errors import InputError, LobraError
from planning.phase_file import phases_from_dict
from tasks.run_folder import RunFolder, changed_keys, read_json
from tasks.send import send_results
from tasks.tracking import Tracker


def track(run: RunConfig, run_dir: Path) -> str:
    """Steps, figures, adapters and registered versions that MLflow lacks; returns the id of the joint run.

    Raises InputError unless `run_dir` holds this run, finished, and LobraError if MLflow does not take everything.
    """
    folder = RunFolder(run_dir)
    if not run.tracking.enabled:
        raise InputError("tracking.enabled is false; set it to true to send the run to MLflow")
    if not folder.is_finished:
        raise InputError(f"{run_dir}: no finished run lies here; `lobra run` finishes and tracks it")
    keys = changed_keys(read_json(folder.config), resolved(run))
    if keys:
        raise InputError(f"{run_dir}: a run of another configuration lies here, these keys differ: {', '.join(keys)}")
    summary = read_json(folder.summary)
    with Tracker(run.tracking, identity(run, folder, phases_from_dict(read_json(folder.plan)))) as tracker:
        send_results(summary, run.tenants, run.base_model, folder, tracker)
    if tracker.is_behind or tracker.parent_run_id is None:
        raise LobraError(
            f"MLflow at {run.tracking.mlflow_uri} did not take all of {run_dir}; try again when it answers"
        )
    return tracker.parent_run_id
