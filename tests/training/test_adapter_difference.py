"""The distance of two adapters, by hand on the smallest shapes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from training.adapter_difference import adapter_difference
from training.adapters import initial_tensor, tensor_keys
from training.base_model import read_base_model
from training.config import BaseModelConfig, TenantConfig

TENANT = TenantConfig(
    name="chat",
    dataset={"path": "unused", "prompt_column": "p", "response_column": "r"},
    adapter={"rank": 2, "alpha": 4, "target_modules": ["v_proj"]},
    optimiser={"learning_rate": 0.01},
    batch_size=1,
    steps=1,
)


def test_the_update_and_not_the_initial_adapter_is_the_measure(base_model_folder: Callable[[str], Path]) -> None:
    base = read_base_model(BaseModelConfig(path=base_model_folder("llama")))
    initial = {key: initial_tensor(base, TENANT, key).numpy() for key in tensor_keys(TENANT.adapter, range(4))}
    first = {key.peft_name: tensor + np.float32(0.5) for key, tensor in initial.items()}
    second = {name: tensor.copy() for name, tensor in first.items()}
    assert adapter_difference(base, TENANT, first, second).is_within_tolerance
    name = next(iter(second))
    second[name][0, 0] += 1e-3
    num_values = sum(tensor.size for tensor in first.values())

    difference = adapter_difference(base, TENANT, first, second)

    assert difference.max_per_learning_rate == pytest.approx(0.1, rel=1e-3)
    assert difference.relative == pytest.approx(1e-3 / (0.5 * num_values**0.5), rel=1e-3)
    assert not difference.is_within_tolerance
