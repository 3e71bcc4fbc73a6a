"""The command line `lobra`. Exit codes: 0 done, 1 failed, 2 bad input.

Prefect, MLflow and torch are imported by the commands that need them alone: `run`, `compare`, `profile`, `track`;
`merge` needs torch.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows import adapter_commands
from planning.errors import InputError, LobraError

app = typer.Typer(
    name="lobra",
    help="Train many tenants' LoRA adapters together on one frozen base model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
errors = Console(stderr=True)

RunFile = Annotated[Path, typer.Argument(help="Run file (YAML)")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables")]


@app.command()
def run(
    run_file: RunFile,
    run_dir: Annotated[
        Path | None, typer.Option(help="Run folder; default runs/<name>. Resumes what lies there")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew; an old run folder is kept, renamed")] = False,
    replan: Annotated[
        bool, typer.Option("--replan", help="Resume on a new plan; cluster, planner and profile may have changed")
    ] = False,
) -> None:
    """Run a joint fine-tuning from data files to adapters."""
    from flows.config import read_run_file
    from flows.report import summary_table
    from flows.validation import check_run
    from tasks.run_folder import RunFolder

    config = read_run_file(run_file)
    folder = run_dir or config.default_run_dir
    if not fresh:
        RunFolder(folder).refuse_finished()
    check_run(config, run_file)
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    from flows.finetune import finetune
    from flows.temporary_server import prefect_server
    from tasks.summary import is_success

    with prefect_server():
        summary = finetune(run=config, run_dir=folder, fresh=fresh, replan=replan)
    console.print(summary_table(summary))
    console.print(f"Run folder: {folder}")
    console.print(f"Compare in MLflow: mlflow ui --backend-store-uri {config.tracking.mlflow_uri}", soft_wrap=True)
    if not all(is_success(tenant["status"]) for tenant in summary["tenants"].values()):
        raise typer.Exit(1)


@app.command()
def compare(
    run_file: RunFile,
    strategies: Annotated[
        str, typer.Option(help="Two or more of strategy[:batching[:bucket rule]], separated by commas")
    ] = "lobra,task_fused",
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the runs; default runs/<name>-compare")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Train anew; old folders are kept, renamed")] = False,
) -> None:
    """Train the same tenants under several strategies and compare cost, losses and adapters."""
    from flows.config import read_run_file
    from flows.report import comparison_tables
    from flows.validation import check_run
    from tasks.comparison import read_variants

    config = read_run_file(run_file)
    variants = strategies.split(",")
    read_variants(variants, config.planner)
    check_run(config, run_file)
    folder = run_dir or Path("runs") / f"{config.name}-compare"
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    from flows.compare import compare as compare_strategies
    from flows.temporary_server import prefect_server

    with prefect_server():
        comparison = compare_strategies(run=config, strategies=variants, run_dir=folder, fresh=fresh)
    for table in comparison_tables(comparison):
        console.print(table)
    console.print(f"Table and figure: {folder}/comparison.md, {folder}/comparison.png", soft_wrap=True)


@app.command()
def plan(
    run_file: RunFile,
    as_json: AsJson = False,
    num_gpus: Annotated[int | None, typer.Option(min=1, help="What if there were so many GPUs? With a curve")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the curve of --num-gpus into this PNG file")] = None,
) -> None:
    """Show the deployment plan, its bound and gap, and what it would cost per tenant. Trains nothing."""
    from flows.report import plan_tables
    from flows.what_if import planned, what_if, what_if_table, what_if_to_dict
    from planning.phase_file import phases_to_dict
    from planning.plan_file import plan_to_dict

    if num_gpus is None:
        phases = planned(run_file)
        content = plan_to_dict(phases[0].plan) if len(phases) == 1 else phases_to_dict(phases)
        tables = [table for phase in phases for table in plan_tables(phase.plan)]
    else:
        answer = what_if(run_file, num_gpus)
        content, tables = what_if_to_dict(answer), [*plan_tables(answer.plans[-1]), what_if_table(answer)]
        if figure is not None:
            from flows.simulation_figures import draw_what_if

            draw_what_if(run_file.stem, answer, figure)
    if as_json:
        typer.echo(json.dumps(content, indent=2))
        return
    for table in tables:
        console.print(table)


@app.command()
def simulate(
    run_file: RunFile,
    as_json: AsJson = False,
    strategies: Annotated[str, typer.Option(help="Strategies to compare, separated by commas; default: all")] = "",
    steps: Annotated[int | None, typer.Option(min=1, help="Simulated steps; default: the run file's")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for NAME.json, NAME.md and NAME.png")] = None,
) -> None:
    """Simulate strategies, ablations or sweeps on a run file of length models. Trains and measures nothing."""
    from flows.simulate import chosen_strategies, read_simulation_file, run_simulation

    config = read_simulation_file(run_file)
    result = run_simulation(config, chosen_strategies(strategies), steps or config.simulation.steps)
    if out is not None:
        from flows.simulation_figures import draw_simulation

        result.write(out)
        draw_simulation(result.content, out / f"{config.name}.png")
    if as_json:
        typer.echo(json.dumps(result.content, indent=2))
        return
    for table in result.to_tables():
        console.print(table)


@app.command()
def profile(
    run_file: RunFile,
    force: Annotated[bool, typer.Option("--force", help="Measure again what is stored already")] = False,
) -> None:
    """Measure what a run's parallel configurations cost on this machine, for `profile.source: measure`."""
    from flows.config import read_run_file
    from flows.report import profile_tables
    from flows.validation import check_run

    config = read_run_file(run_file)
    check_run(config, run_file)
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    from flows.profile import profile as measure
    from flows.temporary_server import prefect_server

    with prefect_server():
        stored = Path(measure(run=config, force=force))
    for table in profile_tables(stored):
        console.print(table)
    console.print(f"Profile: {stored}", soft_wrap=True)


@app.command()
def validate(run_file: RunFile) -> None:
    """Check a run file and every row of its data. Trains nothing."""
    from flows.config import read_run_file
    from flows.preview import preview
    from flows.report import validation_table
    from flows.validation import check_run
    from planning.phase_file import describe

    config = read_run_file(run_file)
    checked = preview(config, check_run(config, run_file))
    phases = checked.plan()  # refuses sequences that no replica holds
    estimate = checked.estimate(phases)
    console.print(validation_table(checked, estimate))
    console.print(
        f"All lengths fit; the run would use the plan {describe(phases)} and cost about "
        f"{sum(estimate.values()):.4g} GPU seconds."
    )
    if checked.failures:
        raise typer.Exit(1)


@app.command()
def status(
    run_dir: Annotated[Path, typer.Argument(help="Run folder")],
    as_json: AsJson = False,
) -> None:
    """Show how far a run is: step, time left, tenants, GPU seconds. Reads files only."""
    from flows.report import status_tables
    from tasks.run_status import read_status

    state = read_status(run_dir)
    if as_json:
        typer.echo(json.dumps(state, indent=2))
        return
    for table in status_tables(state):
        console.print(table)


@app.command()
def track(
    run_file: RunFile,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder; default runs/<name>")] = None,
) -> None:
    """Send a finished run to MLflow again, for what MLflow missed while it was away."""
    from flows.config import read_run_file
    from flows.track import track as send

    config = read_run_file(run_file)
    run_id = send(config, run_dir or config.default_run_dir)
    console.print(f"MLflow run {run_id} in {config.tracking.mlflow_uri}", soft_wrap=True)


@app.command()
def gc(
    keep_days: Annotated[float, typer.Option(min=0, help="Remove what is older than this many days")],
    runs: Annotated[Path, typer.Option(help="Folder that holds the runs")] = Path("runs"),
    cache_dir: Annotated[Path | None, typer.Option(help="Token cache; default RUNS/.cache")] = None,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Unfinished runs too")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed")] = False,
) -> None:
    """Remove old finished runs, folders set aside by --fresh, and token files that no kept run uses."""
    from flows.report import removal_tables
    from tasks.gc import GcRequest, collect_garbage

    request = GcRequest(runs, cache_dir or runs / ".cache", keep_days, unfinished, dry_run)
    for table in removal_tables(collect_garbage(request), dry_run):
        console.print(table)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Run file to write")] = Path("run.yaml"),
) -> None:
    """Write a commented run file to start from."""
    from flows.template import RUN_FILE_TEMPLATE

    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(RUN_FILE_TEMPLATE)
    except FileExistsError as error:
        raise InputError(f"{path} exists; name another file") from error
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error}") from error
    console.print(f"Wrote {path}. Edit it, then: lobra validate {path}")


@app.command()
def schema() -> None:
    """Print the JSON schema of a run file."""
    from flows.config import RunConfig

    typer.echo(json.dumps(RunConfig.model_json_schema(), indent=2))


app.command()(adapter_commands.export)
app.command()(adapter_commands.merge)


def main() -> None:
    """Entry point: turns the product's errors into one message and an exit code."""
    try:
        app(standalone_mode=True)
    except InputError as error:
        errors.print(f"[red]error:[/red] {error}", soft_wrap=True, highlight=False)
        sys.exit(2)
    except LobraError as error:
        errors.print(f"[red]failed:[/red] {error}", soft_wrap=True, highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        errors.print("stopped; the same command resumes the run")
        sys.exit(1)


if __name__ == "__main__":
    main()
