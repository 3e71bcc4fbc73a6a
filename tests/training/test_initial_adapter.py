"""The adapter that a tenant continues from is judged before anything is built on it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from training.adapters import initial_tensor, tensor_keys, tensor_place
from training.base_model import BaseModel, read_base_model
from training.config import AdapterConfig, BaseModelConfig, TenantConfig
from training.initial_adapter import InitialAdapterError, check_initial_adapter

TARGETS = ("q_proj", "down_proj")
Q_PROJ_A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def base(base_model_folder: Callable[[str], Path]) -> BaseModel:
    return read_base_model(BaseModelConfig(path=base_model_folder("llama")))


@pytest.fixture
def folder(base: BaseModel, tmp_path: Path) -> Path:
    """A PEFT folder of rank 4 with peft's own configuration file."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGETS), lora_dropout=0.1)
    config.base_model_name_or_path = "someone/llama"
    config.save_pretrained(tmp_path / "adapter")
    adapter = AdapterConfig(rank=4, alpha=8, target_modules=TARGETS)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        key.peft_name: torch.randn(tensor_place(base, adapter, key).shape, generator=generator)
        for key in tensor_keys(adapter, range(base.num_layers))
    }
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    return tmp_path / "adapter"


def config_of(folder: Path) -> AdapterConfig:
    return AdapterConfig(rank=4, alpha=8, target_modules=TARGETS, initial_adapter=folder)


def set_config(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return rewrite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_peft_folder_of_any_float_format_passes_and_is_where_training_starts(
    dtype: torch.dtype, folder: Path, base: BaseModel
) -> None:
    weights = folder / "adapter_model.safetensors"
    stored = {name: tensor.to(dtype) for name, tensor in load_file(weights).items()}
    save_file(stored, weights)
    check_initial_adapter("anna", config_of(folder), base)
    tenant = TenantConfig(
        name="anna",
        dataset={"path": "unused", "prompt_column": "p", "response_column": "r"},
        adapter=config_of(folder),
        batch_size=4,
        steps=1,
    )
    for key in tensor_keys(tenant.adapter, range(base.num_layers)):
        start = initial_tensor(base, tenant, key)
        assert start.dtype == torch.float32
        assert torch.equal(start, stored[key.peft_name].float())


BAD = {
    "no config": (lambda f: (f / "adapter_config.json").unlink(), r"adapter_config\.json is missing"),
    "broken config": (lambda f: (f / "adapter_config.json").write_text("{"), r"adapter_config\.json cannot be read"),
    "pickle": (
        lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"),
        r"pickled adapter_model\.bin is refused.*safe_serialization=True",
    ),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), r"adapter_model\.safetensors is missing$"),
    "truncated": (
        lambda f: (f / "adapter_model.safetensors").write_bytes(b"\x08\x00\x00"),
        r"adapter_model\.safetensors cannot be read",
    ),
    "rank": (set_config(r=8), r"its r is 8, but adapter\.rank is 4; set adapter\.rank"),
    "alpha": (set_config(lora_alpha=16), r"its lora_alpha is 16, but adapter\.alpha is 8"),
    "targets": (set_config(target_modules=["q_proj"]), "target_modules are q_proj, but .* are down_proj, q_proj"),
    "base model": (set_config(base_model_name_or_path="a/gemma"), "base model a/gemma, but base_model.path is .*llama"),
    "prompt tuning": (set_config(peft_type="PROMPT_TUNING"), "peft_type is 'PROMPT_TUNING', which is not supported"),
    "dora": (set_config(use_dora=True), "use_dora is True, which is not supported; only plain LoRA is"),
    "rslora": (set_config(use_rslora=True), "use_rslora is True"),
    "bias": (set_config(bias="all"), "bias is 'all'"),
    "modules_to_save": (set_config(modules_to_save=["lm_head"]), r"modules_to_save is \['lm_head'\]"),
    "rank_pattern": (set_config(rank_pattern={"q_proj": 2}), "rank_pattern is"),
    "pissa": (set_config(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
    "missing tensor": (change_tensors(lambda t: t.pop(Q_PROJ_A)), f"misses the tensor {Q_PROJ_A} .1 in all"),
    "extra tensor": (
        change_tensors(lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(1)})),
        r"has also the tensor base_model\.model\.lm_head\.weight",
    ),
    "shape": (
        change_tensors(lambda t: t.update({Q_PROJ_A: torch.zeros(4, 32)})),
        rf"{Q_PROJ_A} has shape \[4, 32\], but the base model needs \[4, 64\]",
    ),
    "integers": (
        change_tensors(lambda t: t.update({Q_PROJ_A: torch.zeros(4, 64, dtype=torch.int8)})),
        f"{Q_PROJ_A} is of type I8",
    ),
    "nan": (change_tensors(lambda t: t[Q_PROJ_A][2].fill_(float("nan"))), f"{Q_PROJ_A} has a value that is not finite"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_training_cannot_continue_from_is_refused_by_name(case: str, folder: Path, base: BaseModel) -> None:
    spoil, message = BAD[case]
    spoil(folder)
    with pytest.raises(InitialAdapterError, match=rf"tenant 'anna': adapter\.initial_adapter .*{message}"):
        check_initial_adapter("anna", config_of(folder), base)


def test_a_missing_folder_is_named(tmp_path: Path, base: BaseModel) -> None:
    with pytest.raises(InitialAdapterError, match="no such folder"):
        check_initial_adapter("anna", config_of(tmp_path / "none"), base)
