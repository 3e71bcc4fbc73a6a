"""A tenant's adapter is found in a run folder by tenant and step; what is not there is named with what is."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from data_prep.names import folder_name
from flows.config import RunConfig
from flows.trained_adapter import export_trained, find_trained
from planning.errors import InputError
from training.checkpoint import CheckpointStore, adapter_file
from training.peft_export import ExportError


@pytest.fixture
def run_dir(tiny_run: Callable[..., RunConfig], workspace: Path) -> Path:
    """A run of which only `short` was trained; checkpoints of steps 4 (B is one) and 2 (B is zero)."""
    folder = workspace / "runs" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(tiny_run().model_dump(mode="json", exclude={"tracking"})))
    store = CheckpointStore(folder / "checkpoints", 2)
    for step, value in ((2, 0.0), (4, 1.0)):
        partial = store.begin(step)
        tensors = {"base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": np.full((2, 4), value)}
        save_file(tensors, adapter_file(partial, folder_name("short")))
        store.commit(partial, {"step": step, "tenants": {}})
    return folder


def test_the_newest_whole_checkpoint_is_taken_unless_a_step_is_named(run_dir: Path) -> None:
    assert find_trained(run_dir, "short", None).checkpoint.step == 4
    assert find_trained(run_dir, "short", 2).checkpoint.step == 2
    next((run_dir / "checkpoints" / "step-00000004" / "adapters").iterdir()).write_bytes(b"damaged")
    assert find_trained(run_dir, "short", None).checkpoint.step == 2


@pytest.mark.parametrize(
    ("tenant", "step", "message"),
    [
        ("shrt", None, "has no tenant 'shrt'; its tenants: short, long"),
        ("long", None, "tenant 'long' was not trained"),
        ("short", 3, "no checkpoint of step 3; there are those of: 4, 2"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(tenant: str, step: int | None, message: str, run_dir: Path) -> None:
    with pytest.raises(InputError, match=message):
        find_trained(run_dir, tenant, step)


def test_without_its_base_model_an_adapter_is_exported_but_not_probed(run_dir: Path, workspace: Path) -> None:
    config = json.loads((run_dir / "config.json").read_text())
    config["base_model"]["path"] = "elsewhere"
    (run_dir / "config.json").write_text(json.dumps(config))
    assert export_trained(find_trained(run_dir, "short", None), workspace / "out") is None
    assert {path.name for path in (workspace / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize(
    ("step", "message"),
    [(2, "never moved"), pytest.param(4, "tenant 'short': peft does not load it", marks=pytest.mark.slow)],
)
def test_an_adapter_that_never_moved_or_fails_its_probe_leaves_nothing_behind(
    step: int, message: str, run_dir: Path, workspace: Path
) -> None:
    with pytest.raises(ExportError, match=message):
        export_trained(find_trained(run_dir, "short", step), workspace / "out")
    assert not [path.name for path in workspace.iterdir() if "out" in path.name]
