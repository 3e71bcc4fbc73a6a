"""A merged model is the base model with the adapter: peft is the oracle, and the rounding is one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from data_prep.names import folder_name
from planning.errors import InputError, LobraError
from training.base_model import BaseModel, peft_name, read_base_model
from training.checkpoint import Checkpoint, adapter_file
from training.config import ALL_TARGETS, AdapterConfig, BaseModelConfig, TenantConfig
from training.merge import merge
from training.peft_export import ExportError, export_adapter

TENANT = TenantConfig(
    name="anna",
    dataset={"path": "unused", "prompt_column": "p", "response_column": "r"},
    adapter=AdapterConfig(rank=8, alpha=12, target_modules=ALL_TARGETS),
    batch_size=1,
    steps=1,
)
TOKENS = torch.arange(5, 45)[None]


@pytest.fixture
def stored_as(base_model_folder: Callable[[str], Path], tmp_path: Path) -> Callable[..., BaseModel]:
    """`stored_as(architecture, dtype)`: the tiny model in five or more shards of a number format."""

    def store(architecture: str, dtype: torch.dtype) -> BaseModel:
        folder = tmp_path / "base"
        model = AutoModelForCausalLM.from_pretrained(base_model_folder(architecture), dtype=dtype)
        model.save_pretrained(folder, max_shard_size="60KB")
        (folder / "tokenizer_config.json").write_text("{}")
        (folder / "pytorch_model.bin").write_bytes(b"a pickle that nobody asked for")
        assert len(list(folder.glob("*.safetensors"))) >= 5
        return read_base_model(BaseModelConfig(path=folder))

    return store


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(TOKENS).logits.float()


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_merged_float32_model_is_that_of_peft(
    architecture: str, stored_as, random_adapters: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    base = stored_as(architecture, torch.float32)
    checkpoint = random_adapters(tmp_path / "checkpoints", base, [TENANT])
    merge(checkpoint, base, TENANT, tmp_path / "merged")
    exported = export_adapter(checkpoint, BaseModelConfig(path=base.folder), TENANT, tmp_path / "adapter")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base.folder), exported)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    wanted, plain = logits(adapted), logits(AutoModelForCausalLM.from_pretrained(base.folder))
    assert (wanted - plain).abs().max() > 0.1, "the adapter must change the output"
    assert (logits(merged) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    for name, value in adapted.merge_and_unload().state_dict().items():
        assert torch.allclose(merged.state_dict()[name], value, rtol=1e-6, atol=1e-6), name
    tied = json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"]
    assert tied == base.tied_embeddings == (merged.lm_head.weight is merged.model.embed_tokens.weight)


def test_a_merged_bfloat16_model_is_rounded_once_and_lies_in_the_shards_of_its_base(
    stored_as, random_adapters: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    base = stored_as("llama", torch.bfloat16)
    checkpoint = random_adapters(tmp_path / "checkpoints", base, [TENANT])
    merge(checkpoint, base, TENANT, tmp_path / "merged")
    adapter = load_file(adapter_file(checkpoint.folder, folder_name(TENANT.name)))
    wanted = tensors_of(base.folder)
    for layer in range(base.num_layers):
        for target in ALL_TARGETS:
            name = peft_name(layer, target, "A").removeprefix("base_model.model.").replace(".lora_A", "")
            update = adapter[peft_name(layer, target, "B")] @ adapter[peft_name(layer, target, "A")]
            wanted[name] = (wanted[name].float() + 1.5 * update).bfloat16()
    found = tensors_of(tmp_path / "merged")
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    names = {path.name for path in base.folder.iterdir()} - {"pytorch_model.bin"}
    assert {path.name for path in (tmp_path / "merged").iterdir()} == names
    for name in names:
        source, copy = base.folder / name, tmp_path / "merged" / name
        assert copy.stat().st_size == source.stat().st_size
        assert name.endswith(".safetensors") or copy.read_bytes() == source.read_bytes()


def test_a_folder_that_holds_something_is_refused_and_left_alone(
    stored_as, random_adapters: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    base = stored_as("llama", torch.bfloat16)
    checkpoint = random_adapters(tmp_path / "checkpoints", base, [TENANT])
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    with pytest.raises(InputError, match="out exists and is not empty; name another folder"):
        merge(checkpoint, base, TENANT, out)
    assert [path.name for path in out.iterdir()] == ["precious"]
    (out / "precious").unlink()
    merge(checkpoint, base, TENANT, out)
    assert (out / "config.json").exists()


def test_a_disk_that_refuses_is_named_and_nothing_is_left(
    stored_as, random_adapters: Callable[..., Checkpoint], tmp_path: Path, monkeypatch
) -> None:
    base = stored_as("llama", torch.bfloat16)
    checkpoint = random_adapters(tmp_path / "checkpoints", base, [TENANT])

    def full_disk(*_paths: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full_disk)
    with pytest.raises(LobraError, match=r"merged cannot be written: .*No space left"):
        merge(checkpoint, base, TENANT, tmp_path / "merged")
    assert not [path.name for path in tmp_path.iterdir() if "merged" in path.name]


def test_a_merge_that_leaves_the_number_format_leaves_nothing_behind(
    stored_as, random_adapters: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    base = stored_as("llama", torch.float16)
    checkpoint = random_adapters(tmp_path / "checkpoints", base, [TENANT])
    shutil.copytree(checkpoint.folder, tmp_path / "large")
    path = adapter_file(tmp_path / "large", folder_name(TENANT.name))
    large = {name: tensor * 1e3 for name, tensor in load_file(path).items()}
    save_file(large, path)
    with pytest.raises(ExportError, match=r"merged, model\.layers\.0\.\S+ leaves the range of torch\.float16"):
        merge(Checkpoint(tmp_path / "large", checkpoint.state), base, TENANT, tmp_path / "merged")
    assert not [path.name for path in tmp_path.iterdir() if "merged" in path.name]
