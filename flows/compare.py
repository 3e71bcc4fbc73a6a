"""The flow `compare`: the same tenants and sequences under several strategies, in one table.

Each variant is an ordinary run of the flow `finetune` with a run folder of its own; what is finished there is not
trained again, so that an interrupted comparison goes on. Comparisons register no adapters and evaluate none, so that
every variant trains all steps and its last adapters are compared.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from flows.config import RunConfig
from flows.finetune import finetune, resolved
from flows.validation import check_run
from planning.errors import InputError
from tasks.comparison import (
    AdapterCheck,
    Variant,
    comparison_markdown,
    comparison_rows,
    comparison_to_dict,
    read_variants,
)
from tasks.comparison_figure import comparison_figure
from tasks.comparison_tracking import ComparisonTracker
from tasks.mlflow_store import RunSpec
from tasks.run_folder import RunFolder, changed_keys, read_json, write_json
from tasks.run_page import figure_markdown
from training.adapter_difference import adapter_difference, read_exported
from training.base_model import BaseModel

DEFAULT_STRATEGIES = ["lobra:padded", "task_fused:padded"]


@flow(name="compare", flow_run_name="compare {run.name}", validate_parameters=True)
def compare(
    run: RunConfig, strategies: list[str] = DEFAULT_STRATEGIES, run_dir: Path | None = None, fresh: bool = False
) -> dict[str, Any]:
    """Train every variant and compare cost, losses and adapters; returns the content of comparison.json.

    A variant is `strategy[:batching[:bucket rule]]`. Without `run_dir` the folder is runs/<flow run id>, so that a
    retry goes on.
    """
    variants = read_variants(strategies, run.planner)
    base = check_run(run)
    folder = run_dir or Path("runs") / str(flow_run.id)
    folder.mkdir(parents=True, exist_ok=True)
    with tracked(run, variants, folder) as tracker:
        summaries = [train_variant(run, variant, folder, fresh, tracker.run_id) for variant in variants]
        checks = compare_adapters(base, run, variants, folder)
        comparison = comparison_to_dict(run.name, comparison_rows(variants, summaries), checks)
        tracker.close(comparison, publish_comparison(comparison, folder))
    return comparison


@contextmanager
def tracked(run: RunConfig, variants: Sequence[Variant], folder: Path) -> Iterator[ComparisonTracker]:
    """The comparison's MLflow run; it ends with the comparison, well or not."""
    tracker = ComparisonTracker(run.tracking, folder)
    names = ",".join(variant.name for variant in variants)
    tags = {"kind": "comparison"} | ({"prefect.flow_run_id": str(flow_run.id)} if flow_run.id else {})
    tracker.open(RunSpec(f"{run.name} compared", {"variants": names}, tags))
    try:
        yield tracker
    except BaseException as error:
        tracker.fail("FAILED" if isinstance(error, Exception) else "KILLED")
        raise


def train_variant(
    run: RunConfig, variant: Variant, folder: Path, fresh: bool, parent_run_id: str | None
) -> dict[str, Any]:
    """Summary of the variant's run, trained now unless it was before. Raises InputError if another run lies there."""
    tracking = run.tracking.model_copy(update={"register_adapters": False, "parent_run_id": parent_run_id})
    own = run.model_copy(
        update={
            "name": f"{run.name}-{variant.name}",
            "tenants": tuple(tenant.model_copy(update={"evaluation": None}) for tenant in run.tenants),
            "planner": variant.planner(run.planner),
            "tracking": tracking,
        }
    )
    run_folder = RunFolder(folder / variant.name)
    if fresh or not run_folder.is_finished:
        trained: dict[str, Any] = finetune(run=own, run_dir=run_folder.path, fresh=fresh)
        return trained
    keys = changed_keys(read_json(run_folder.config), resolved(own))
    if keys:
        raise InputError(
            f"{run_folder.path}: a run of another configuration lies here, these keys differ: {', '.join(keys)}; "
            "add --fresh to train all variants anew"
        )
    finished: dict[str, Any] = read_json(run_folder.summary)
    return finished


@task(name="compare adapters", cache_policy=NO_CACHE)
def compare_adapters(base: BaseModel, run: RunConfig, variants: Sequence[Variant], folder: Path) -> list[AdapterCheck]:
    """Every tenant's adapters of every two variants that both published one."""
    checks = []
    for tenant in run.tenants:
        paths = {variant.name: RunFolder(folder / variant.name).adapter(tenant.name) for variant in variants}
        adapters = {name: read_exported(path) for name, path in paths.items() if path.is_dir()}
        for first, second in combinations(adapters, 2):
            difference = adapter_difference(base, tenant, adapters[first], adapters[second])
            checks.append(
                AdapterCheck(
                    tenant=tenant.name,
                    first=first,
                    second=second,
                    max_per_learning_rate=difference.max_per_learning_rate,
                    relative=difference.relative,
                    is_within_tolerance=difference.is_within_tolerance,
                )
            )
    return checks


@task(name="publish comparison", cache_policy=NO_CACHE)
def publish_comparison(comparison: dict[str, Any], folder: Path) -> list[Path]:
    """comparison.json, its table as Markdown and its figure, in the folder and on the run page; returns the files."""
    figure, table, numbers = (folder / f"comparison.{suffix}" for suffix in ("png", "md", "json"))
    comparison_figure(comparison, figure)
    text = comparison_markdown(comparison)
    table.write_text(text, encoding="utf-8")
    picture = figure_markdown(figure, "GPU seconds by strategy")
    create_markdown_artifact(f"{text}\n{picture}", key="comparison", description="Strategies compared")
    write_json(numbers, comparison)
    return [figure, table, numbers]
