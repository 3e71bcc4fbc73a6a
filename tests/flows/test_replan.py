"""A run that was stopped goes on under another plan, on another number of GPUs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.config import RunConfig
from flows.finetune import finetune
from planning.errors import InputError
from tasks.run_folder import RunFolder, read_json
from training.adapter_difference import adapter_difference, read_exported
from training.base_model import read_base_model
from training.controller import BudgetSpentError
from training.journal import effective_steps, read_journal

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.mark.slow
def test_a_stopped_run_goes_on_under_another_plan_to_the_same_adapters(
    tiny_run: Callable[..., RunConfig], workspace: Path
) -> None:
    unbroken = finetune(run=tiny_run(), run_dir=Path("runs/unbroken"))
    folder = RunFolder(Path("runs/moved"))
    with pytest.raises(BudgetSpentError):
        finetune(run=tiny_run(training={"save_every": 2, "max_gpu_seconds": 1e-3}), run_dir=folder.path)
    assert read_journal(folder.steps)
    moved = tiny_run(cluster={"num_gpus": 2, "backend": "gloo"}, planner={"batching": "packed"})
    with pytest.raises(InputError, match=r"cluster\.num_gpus.* --replan"):
        finetune(run=moved, run_dir=folder.path)
    summary = finetune(run=moved, run_dir=folder.path, replan=True)
    assert summary["plan"] != unbroken["plan"]
    assert read_json(folder.config)["cluster"]["num_gpus"] == 2
    steps = effective_steps(read_journal(folder.steps))
    assert [round(step["gpu_seconds"] / step["measured_seconds"]) for step in steps] == [3, 2, 2, 2]
    base = read_base_model(moved.base_model)
    for tenant in moved.tenants:
        paths = [Path(each["tenants"][tenant.name]["adapter_path"]) for each in (unbroken, summary)]
        assert adapter_difference(base, tenant, *map(read_exported, paths)).is_within_tolerance
