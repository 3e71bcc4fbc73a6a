"""How far a run is, from its files alone: no server is asked. No Prefect here."""

from pathlib import Path
from typing import Any

from planning.errors import InputError
from tasks.run_folder import RunFolder, read_json
from tasks.summary import evaluation_totals, tenant_totals
from training.checkpoint import CONTROLLER_STATE
from training.journal import effective_steps, overhead_gpu_seconds, read_journal

NUM_RECENT_STEPS = 20  # the time left is estimated from these


def read_status(run_dir: Path) -> dict[str, Any]:
    """State of a run folder: stage, step, seconds left, tenants, GPU seconds.

    Raises InputError when the folder is not a run folder.
    """
    folder = RunFolder(run_dir)
    if not folder.config.exists():
        raise InputError(f"{run_dir}: not a run folder (no config.json); give the folder that `lobra run` named")
    records = read_journal(folder.steps)
    steps = effective_steps(records)
    launches = [record for record in records if record["event"] == "launch"]
    num_steps = launches[-1]["num_steps"] if launches else {}
    summary = read_json(folder.summary) if folder.is_finished else None
    recent = steps[-NUM_RECENT_STEPS:]
    step_seconds = sum(step["measured_seconds"] for step in recent) / len(recent) if recent else None
    done = steps[-1]["step"] + 1 if steps else 0
    total = steps[-1].get("num_steps") if steps else max(num_steps.values(), default=None)
    checkpointed = _checkpointed_tenants(folder)
    return {
        "run_dir": str(run_dir),
        "stage": _stage(folder, records),
        "step": done,
        "num_steps": total,
        "seconds_left": None if step_seconds is None or total is None else step_seconds * (total - done),
        "gpu_seconds": sum(step["gpu_seconds"] for step in steps),
        "overhead_gpu_seconds": overhead_gpu_seconds(records),
        "tenants": summary["tenants"]
        if summary
        else {
            name: {
                "status": checkpointed.get(name, {}).get("status", "running"),
                "num_steps": num_steps[name],
                "adapter_path": str(folder.adapter(name)) if folder.publication(name).exists() else None,
                **tenant_totals(steps, name),
                **evaluation_totals(records, name),
            }
            for name in num_steps
        },
    }


def _stage(folder: RunFolder, records: list[dict[str, Any]]) -> str:
    if folder.is_finished:
        return "finished"
    if records and records[-1]["event"] == "abort":
        return f"stopped: {records[-1]['reason']}"
    done = [name for name, path in _stage_files(folder) if path.exists()]
    return {0: "preparing", 1: "measuring", 2: "planning", 3: "training"}[len(done)]


def _stage_files(folder: RunFolder) -> tuple[tuple[str, Path], ...]:
    return ("prepare", folder.prepared), ("measure", folder.histogram), ("plan", folder.plan)


def _checkpointed_tenants(folder: RunFolder) -> dict[str, Any]:
    """Tenants' progress in the newest checkpoint."""
    states = sorted(folder.checkpoints.glob(f"step-*[0-9]/{CONTROLLER_STATE}"))
    return read_json(states[-1])["tenants"] if states else {}
