"""The base model folder is judged before anything is built on it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from planning.types import ModelShape
from training.base_model import BaseModelError, read_base_model
from training.config import BaseModelConfig, DType


@pytest.fixture
def folder(base_model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """A private copy of the tiny Llama."""
    return Path(shutil.copytree(base_model_folder("llama"), tmp_path / "llama"))


def read(folder: Path):
    return read_base_model(BaseModelConfig(path=folder))


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_saved_models_of_all_architectures_pass(architecture: str, base_model_folder: Callable[[str], Path]) -> None:
    base = read(base_model_folder(architecture))
    base.check_weights()
    head_dim = 16 if architecture == "qwen3" else 8
    tied = architecture in ("qwen2", "qwen3")
    assert base.shape(DType.BFLOAT16) == ModelShape(4, 64, 96, 8, 4, head_dim, 301, tied, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "architecture 'gpt2' is not supported; choose one of llama"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling"),
        ({"attention_bias": True}, "biases"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_what_megatron_would_compute_differently_is_refused(folder: Path, change: dict, message: str) -> None:
    change_config(folder, **change)
    with pytest.raises(BaseModelError, match=message):
        read(folder)


def test_missing_folder_and_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match="no such folder"):
        read(tmp_path / "none")
    with pytest.raises(BaseModelError, match=r"config\.json is missing"):
        read(tmp_path)


def test_missing_extra_and_misshapen_tensors_are_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    without = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    save_file(without, folder / "model.safetensors")
    with pytest.raises(BaseModelError, match=r"model\.norm\.weight is missing"):
        read(folder).check_weights()
    save_file({**tensors, "model.extra.weight": tensors["model.norm.weight"].clone()}, folder / "model.safetensors")
    with pytest.raises(BaseModelError, match=r"unknown tensor model\.extra\.weight"):
        read(folder).check_weights()
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"][:5].clone()}, folder / "model.safetensors")
    with pytest.raises(BaseModelError, match=r"model\.norm\.weight has shape \(5,\), but config\.json says \(64,\)"):
        read(folder).check_weights()


def test_weights_of_another_number_format_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BaseModelError, match=r"model\.norm\.weight is of type I8; give float weights"):
        read(folder).check_weights()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not an index of safetensors files"),
        ("[1]", "not an index of safetensors files"),
        ('{"weight_map": {"model.norm.weight": "../other/model.safetensors"}}', "lies in another folder"),
    ],
)
def test_a_broken_index_is_named(index: str, message: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(BaseModelError, match=rf"model\.safetensors\.index\.json: .*{message}"):
        read(folder).check_weights()


def test_a_shard_without_the_tensor_that_the_index_promises_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    read(folder).check_weights()
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BaseModelError, match=r"model\.safetensors: tensor model\.norm\.weight is not in it"):
        read(folder).check_weights()


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BaseModelError, match="pickled weights are refused"):
        read(folder).check_weights()


def test_a_truncated_safetensors_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(BaseModelError, match=r"model\.safetensors: not a valid safetensors file"):
        read(folder).check_weights()
