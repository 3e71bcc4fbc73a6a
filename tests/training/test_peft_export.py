"""An exported adapter on the Hugging Face model is the adapter that the fleet trained."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from data_prep.collate import collate
from data_prep.names import folder_name
from data_prep.token_file import TokenFile
from planning.config import Backend
from planning.types import Chunk, ParallelConfig, Replica, SequenceRef
from training.adapters import TensorKey
from training.checkpoint import Checkpoint, CheckpointStore, adapter_file, read_checkpoint
from training.config import ALL_TARGETS, AdapterConfig, BaseModelConfig, TenantConfig
from training.fleet_spec import FleetSpec
from training.peft_export import ExportError, export_adapter
from training.worker import Worker

TENANT = TenantConfig(
    name="Zoë & co",
    dataset={"path": "unused", "prompt_column": "p", "response_column": "r"},
    adapter=AdapterConfig(rank=8, alpha=12, target_modules=ALL_TARGETS),
    batch_size=1,
    steps=1,
)


def random_checkpoint(run_ranks, spec: FleetSpec, root: Path) -> Checkpoint:
    """A checkpoint whose adapter is random, saved by the ranks themselves."""

    def save(rank: int) -> None:
        worker = Worker(spec, rank, "cpu", torch.distributed.HashStore())
        adapter = worker.optimisers[TENANT.name].adapter
        for key, parameter in adapter.parameters.items():
            place = adapter.place(key)
            full = torch.randn(place.shape, generator=torch.Generator().manual_seed(seed_of(key))) * 0.1
            parameter.data.copy_(place.to_local(full, worker.stage.tp, worker.stage.tp_rank))
        worker.writer.write(root / "partial", worker.snapshot())

    for name in ("adapters", "optimiser"):
        (root / "partial" / name).mkdir(parents=True, exist_ok=True)
    run_ranks(spec.world_size, save)

    store = CheckpointStore(root / "checkpoints", 2)
    folder = store.begin(1)
    for name in ("adapters", "optimiser"):
        for file in (root / "partial" / name).iterdir():
            file.rename(folder / name / file.name)
    return read_checkpoint(store.commit(folder, {"step": 1}))


def seed_of(key: TensorKey) -> int:
    return 1000 * key.layer + 10 * ALL_TARGETS.index(key.target) + "AB".index(key.matrix)


def spec_for(
    folder: Path, configs: tuple[ParallelConfig, ...], path: Path, checkpoint: Path | None = None
) -> FleetSpec:
    replicas, first = [], 0
    for index, config in enumerate(configs):
        replicas.append(Replica(index, config, first))
        first += config.num_gpus
    return FleetSpec(
        replicas=tuple(replicas),
        base_model=BaseModelConfig(path=folder),
        tenants=(TENANT,),
        token_paths={TENANT.name: path},
        checkpoint=checkpoint,
        num_updates={TENANT.name: 0},
        backend=Backend.GLOO,
        step_timeout_seconds=60,
        log_dir=folder,
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_exported_adapter_gives_the_logits_of_the_fleet(
    architecture: str,
    base_model_folder: Callable[[str], Path],
    token_path: Callable[..., Path],
    tmp_path: Path,
    run_ranks,
) -> None:
    folder = base_model_folder(architecture)
    path = token_path(tmp_path, "tokens", [40], seed=3)
    saved = random_checkpoint(run_ranks, spec_for(folder, (ParallelConfig(2, 2),), path), tmp_path)
    exported = export_adapter(saved, BaseModelConfig(path=folder), TENANT, tmp_path / "adapter")
    elsewhere = spec_for(folder, (ParallelConfig(2, 1),), path, saved.folder)
    chunk = Chunk((SequenceRef(TENANT.name, 0, 40),), 44)

    def fleet_logits(rank: int) -> np.ndarray:
        worker = Worker(elsewhere, rank, "cpu", torch.distributed.HashStore())
        logits = worker.model.logits(collate(chunk, worker.token_files, {TENANT.name: 1.0}))
        return logits[0, :40].numpy()

    def peft_logits(_rank: int) -> tuple[np.ndarray, np.ndarray]:
        ids = torch.from_numpy(TokenFile(path).row(0).input_ids.astype(np.int64))[None]
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            plain = base(ids).logits[0].numpy()
            return plain, PeftModel.from_pretrained(base, exported)(ids).logits[0].numpy()

    plain, wanted = run_ranks(1, peft_logits)[0]
    assert np.abs(wanted - plain).max() > 0.1, "the adapter must change the output"
    assert np.abs(run_ranks(2, fleet_logits)[0] - wanted).max() <= 1e-5 * max(1.0, np.abs(wanted).max())


def test_one_checkpoint_is_the_same_bytes_from_any_layout(
    base_model_folder, token_path, tmp_path: Path, run_ranks
) -> None:
    folder = base_model_folder("llama")
    path = token_path(tmp_path, "tokens", [10], seed=3)
    layouts = [(ParallelConfig(1, 1),), (ParallelConfig(2, 2),), (ParallelConfig(1, 4), ParallelConfig(2, 1))]
    contents = []
    for number, layout in enumerate(layouts):
        saved = random_checkpoint(run_ranks, spec_for(folder, layout, path), tmp_path / str(number))
        contents.append(adapter_file(saved.folder, folder_name(TENANT.name)).read_bytes())
    assert contents[0] == contents[1] == contents[2]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[dict[str, torch.Tensor]], Checkpoint]:
    """A checkpoint that holds given tensors as the tenant's adapter."""

    def build(tensors: dict[str, torch.Tensor]) -> Checkpoint:
        store = CheckpointStore(tmp_path / "checkpoints", 2)
        folder = store.begin(1)
        save_file(tensors, adapter_file(folder, folder_name(TENANT.name)))
        return read_checkpoint(store.commit(folder, {"step": 1}))

    return build


def test_config_states_rank_alpha_targets_and_base(checkpoint, tmp_path: Path) -> None:
    saved = checkpoint({TensorKey(0, "q_proj", "B").peft_name: torch.ones(2, 8)})
    folder = export_adapter(saved, BaseModelConfig(path="models/base"), TENANT, tmp_path / "out")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (8, 12, "models/base")
    assert config["target_modules"] == list(ALL_TARGETS)
    assert load_file(folder / "adapter_model.safetensors").keys() == {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    }


@pytest.mark.parametrize(("value", "message"), [(float("nan"), "non-finite value in"), (0.0, "never moved")])
def test_an_adapter_that_is_nan_or_never_moved_is_not_published(
    value: float, message: str, checkpoint, tmp_path: Path
) -> None:
    saved = checkpoint({TensorKey(0, "q_proj", "B").peft_name: torch.full((2, 8), value)})
    with pytest.raises(ExportError, match=f"tenant 'Zoë & co'.*{message}"):
        export_adapter(saved, BaseModelConfig(path="models/base"), TENANT, tmp_path / "out")
    assert not (tmp_path / "out").exists()
