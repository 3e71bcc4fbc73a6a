"""The logits probe lets good adapters pass and names what is wrong with the others."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from data_prep.names import folder_name
from training.adapter_probe import ProbeItem, ProbeResult, probe_adapters, probe_item
from training.base_model import read_base_model
from training.checkpoint import Checkpoint, adapter_file
from training.config import ALL_TARGETS, AdapterConfig, BaseModelConfig, DType, TenantConfig
from training.peft_export import export_adapter


def tenant(name: str, rank: int, targets: tuple[str, ...]) -> TenantConfig:
    return TenantConfig(
        name=name,
        dataset={"path": "unused", "prompt_column": "p", "response_column": "r"},
        adapter=AdapterConfig(rank=rank, alpha=12, target_modules=targets),
        batch_size=1,
        steps=1,
    )


TENANTS = (tenant("first", 8, ALL_TARGETS), tenant("second", 4, ("v_proj", "down_proj")))


@pytest.fixture
def exported(
    base_model_folder: Callable[[str], Path], random_adapters: Callable[..., Checkpoint], tmp_path: Path
) -> Callable[..., list[ProbeItem]]:
    """`exported(architecture)`: both tenants with random adapters of a few percent, exported; what to probe."""

    def build(architecture: str) -> list[ProbeItem]:
        config = BaseModelConfig(path=base_model_folder(architecture))
        base = read_base_model(config)
        checkpoint = random_adapters(tmp_path / architecture, base, TENANTS)
        items = []
        for own in TENANTS:
            folder = export_adapter(checkpoint, config, own, tmp_path / folder_name(own.name))
            weights = adapter_file(checkpoint.folder, folder_name(own.name))
            items.append(probe_item(folder, weights, own, base.num_layers))
        return items

    return build


def probed(base_model_folder, items: list[ProbeItem], dtype: DType = DType.FLOAT32) -> list[ProbeResult]:
    return probe_adapters(BaseModelConfig(path=base_model_folder("llama"), dtype=dtype), items)


@pytest.mark.parametrize("dtype", list(DType))
def test_exported_adapters_pass_with_an_error_far_below_their_effect(dtype, base_model_folder, exported) -> None:
    for result in probed(base_model_folder, exported("llama"), dtype):
        assert result.has_passed, result.reason
        assert result.effect > 1e-3
        assert result.error <= 1e-4


def test_each_kind_of_bad_adapter_is_found_and_the_good_one_after_them_passes(
    base_model_folder, exported, tmp_path: Path
) -> None:
    first, second = exported("llama")

    def spoiled(item: ProbeItem, name: str, change: Callable[[dict], dict]) -> ProbeItem:
        folder = shutil.copytree(item.exported, tmp_path / name)
        file = folder / "adapter_model.safetensors"
        save_file(change(load_file(file)), file)
        return replace(item, exported=str(folder))

    def without_one_module(tensors: dict) -> dict:
        tensors["base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"].zero_()
        return tensors

    items = [
        spoiled(first, "keys", lambda t: {name.removeprefix("base_model.model."): value for name, value in t.items()}),
        spoiled(first, "refused", lambda t: {name: value[:2].contiguous() for name, value in t.items()}),
        spoiled(first, "module", without_one_module),
        spoiled(second, "scale", lambda t: t),
        second,
    ]
    config = Path(items[3].exported) / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 24}))

    keys, refused, one_module, scale, good = probed(base_model_folder, items)

    assert "its keys do not match the model" in keys.reason
    assert refused.reason.startswith("peft does not load it: RuntimeError")
    assert "off the trained adapter's" in one_module.reason
    assert "off the trained adapter's" in scale.reason
    assert scale.error > one_module.error > 0.05
    assert good.has_passed, good.reason


def test_a_probe_that_cannot_run_fails_every_adapter_with_its_last_words(tmp_path: Path, exported) -> None:
    results = probe_adapters(BaseModelConfig(path=tmp_path / "nowhere"), exported("llama"))
    assert [result.has_passed for result in results] == [False, False]
    assert "could not run: it ended with code 1" in results[0].reason
