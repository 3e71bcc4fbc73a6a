"""The commands `lobra export` and `lobra merge`: a tenant's adapter, taken out of a run's checkpoint."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console()

RunDir = Annotated[Path, typer.Argument(help="Run folder; the run may still be under way")]
Tenant = Annotated[str, typer.Argument(help="Name of the tenant")]
Out = Annotated[Path, typer.Argument(help="Folder to write; it must be new or empty")]
Step = Annotated[int | None, typer.Option(min=1, help="Steps done at the checkpoint; default: the newest whole one")]


def export(run_dir: RunDir, tenant: Tenant, out: Out, step: Step = None) -> None:
    """Write a tenant's PEFT folder as a run that ended at the checkpoint would publish it: best or last adapter."""
    from flows.trained_adapter import export_trained, find_trained

    trained = find_trained(run_dir, tenant, step)
    probe = export_trained(trained, out)
    verdict = "not probed, because the base model is not here"
    if probe is not None:
        verdict = f"changes the logits by {probe.effect:.2%}"
    console.print(f"Adapter of {tenant} after {trained.checkpoint.step} steps ({verdict}): {out}", soft_wrap=True)


def merge(run_dir: RunDir, tenant: Tenant, out: Out, step: Step = None) -> None:
    """Write the base model with the adapter of `lobra export` merged into it: a Hugging Face folder."""
    from flows.trained_adapter import find_trained
    from training.base_model import read_base_model
    from training.merge import merge as merge_into

    trained = find_trained(run_dir, tenant, step)
    base = read_base_model(trained.base_model)
    base.check_weights()
    merge_into(trained.checkpoint, base, trained.tenant, out)
    console.print(f"Merged model of {tenant} after {trained.checkpoint.step} steps: {out}", soft_wrap=True)
