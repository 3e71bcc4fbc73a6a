"""report.html: one run on one page, in one file that needs no network and no script. Made from the run folder alone.

Every text is escaped by jinja2: tenants' names and reasons come from users. No row of a data set is in it.
"""

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from planning.phase_file import phases_from_dict
from tasks.figure_style import short_number
from tasks.run_folder import RunFolder, read_json
from tasks.summary import NUM_LOSS_STEPS, is_success, shown, shown_evaluation
from training.journal import read_journal

TEMPLATE = Path(__file__).with_name("report.html.jinja")
NUM_SHOWN_CHECKPOINTS = 3
BAD_EVENTS = ("abort", "restart", "quarantined", "cancelled", "damaged_checkpoint")
FIGURES = {  # file name in the run's figures -> heading and caption, in the order of the page
    "plan": (
        "Plan",
        "Each block is one replica of the base model. Below: what the plan expects a step to cost each tenant, and the "
        "plans that were weighed against it. Where tenants train one after the other, a layout that several share "
        "is drawn once, for the last of them.",
    ),
    "lengths": (
        "Sequence lengths and buckets",
        "Each tenant's sequences by length, on a logarithmic axis. Dashed lines are the lengths that sequences were "
        "padded to in the last step; a packed run has none.",
    ),
    "balance": (
        "Busy time per replica and step",
        "All replicas wait for the slowest before the next step; the more even the rows, the less is paid for waiting.",
    ),
    "padding": ("Padding per step", "Padding tokens as a part of all computed tokens: they cost as much as real ones."),
    "losses": (
        "Loss per tenant",
        "Mean loss of the supervised tokens of each step. Rings: loss on the rows held out for evaluation.",
    ),
    "gpu_seconds": ("GPU seconds per tenant", "Each step's bill, divided by the work of each tenant's sequences."),
}


def write_report(summary: Mapping[str, Any], folder: RunFolder) -> Path:
    """Write report.html from the run's figures, journal, plan and manifest of its data; returns its path."""
    config = read_json(folder.config)
    phases = phases_from_dict(read_json(folder.plan))
    records = read_journal(folder.steps)
    tenants = [_tenant(name, totals, summary) for name, totals in summary["tenants"].items()]
    content = (
        _environment()
        .from_string(TEMPLATE.read_text(encoding="utf-8"))
        .render(
            name=config["name"],
            batching=config["planner"].get("batching", ""),
            base_model=config["base_model"]["path"],
            run_dir=folder.path,
            summary=summary,
            tenants=tenants,
            num_finished=sum(tenant["is_good"] for tenant in tenants),
            is_evaluated=any(tenant["num_evaluations"] for tenant in tenants),
            num_tokens=sum(tenant["tokens"] for tenant in tenants),
            estimate=sum(tenant["estimate"] for tenant in tenants),
            figures=_figures(folder),
            data=read_json(folder.prepared)["tenants"],
            pruned=phases[0].plan.pruned,
            num_loss_steps=NUM_LOSS_STEPS,
            **_events(records),
        )
    )
    folder.report.write_text(content, encoding="utf-8")
    return folder.report


def _environment() -> Environment:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"number": _number, "percent": _percent, "loss": shown}
    return environment


def _tenant(name: str, totals: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    bill = summary["gpu_seconds"]
    return {
        "name": name,
        **totals,
        "is_good": is_success(totals["status"]),
        "evaluation": shown_evaluation(totals),
        "estimate": totals["estimated_gpu_seconds"] or 0.0,
        "share": totals["gpu_seconds"] / bill if bill else 0.0,
    }


def _figures(folder: RunFolder) -> list[dict[str, str]]:
    figures = []
    for name, (title, caption) in FIGURES.items():
        for path in sorted(folder.figures.glob(f"{name}*.png")):
            encoded = base64.b64encode(path.read_bytes()).decode("ascii")
            figures.append({"title": title, "caption": caption, "base64": encoded})
    return figures


def _events(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything of the journal but steps and evaluations; of many checkpoints the last few."""
    kinds = [record["event"] for record in records]
    num_checkpoints = kinds.count("checkpoint")
    num_hidden = max(0, num_checkpoints - NUM_SHOWN_CHECKPOINTS)
    events, num_seen = [], 0
    for record in records:
        if record["event"] in ("step", "evaluation"):
            continue
        num_seen += record["event"] == "checkpoint"
        if record["event"] != "checkpoint" or num_seen > num_hidden:
            events.append(_event(record))
    return {
        "events": events,
        "num_checkpoints": num_checkpoints,
        "num_restarts": kinds.count("restart"),
        "num_interruptions": kinds.count("abort"),
        "num_quarantines": kinds.count("quarantined"),
    }


def _event(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": record["event"].replace("_", " "),
        "is_bad": record["event"] in BAD_EVENTS,
        "time": f"{datetime.fromtimestamp(record['time'], UTC):%Y-%m-%d %H:%M:%S}",
        "step": record.get("step", "-"),
        "gpu_seconds": record.get("overhead_gpu_seconds"),
        "detail": ", ".join(str(record[key]) for key in ("tenant", "folder", "reason") if record.get(key)),
    }


def _number(value: float | None) -> str:
    return "-" if value is None else short_number(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
