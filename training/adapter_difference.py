"""How far two adapters of one tenant are apart, against the numerics contract (DESIGN.md, "Numerics").

Both start from the same initial adapter, so their updates are their distances from it. The contract holds for float32
base models; a bfloat16 one rounds its activations differently in every split.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from training.adapters import initial_tensor, tensor_keys
from training.base_model import BaseModel
from training.config import TenantConfig

MAX_DIFFERENCE_PER_LEARNING_RATE = 2e-2
MAX_RELATIVE_DIFFERENCE = 1e-4

Tensors = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class AdapterDifference:
    """Largest difference of a value / learning rate, and norm of the difference / norm of the first's update."""

    max_per_learning_rate: float
    relative: float

    @property
    def is_within_tolerance(self) -> bool:
        return (
            self.max_per_learning_rate <= MAX_DIFFERENCE_PER_LEARNING_RATE and self.relative <= MAX_RELATIVE_DIFFERENCE
        )


def read_exported(folder: Path) -> Tensors:
    """The tensors of an exported adapter, by peft's names."""
    tensors: Tensors = load_file(folder / "adapter_model.safetensors")
    return tensors


def adapter_difference(
    base: BaseModel, tenant: TenantConfig, first: Mapping[str, npt.NDArray], second: Mapping[str, npt.NDArray]
) -> AdapterDifference:
    """Compare all tensors of two adapters of `tenant`."""
    largest = squared_difference = squared_update = 0.0
    for key in tensor_keys(tenant.adapter, range(base.num_layers)):
        one = first[key.peft_name].astype(np.float64)
        difference = second[key.peft_name].astype(np.float64) - one
        update = one - initial_tensor(base, tenant, key).numpy()
        largest = max(largest, float(np.abs(difference).max()))
        squared_difference += float((difference**2).sum())
        squared_update += float((update**2).sum())
    return AdapterDifference(
        largest / tenant.optimiser.learning_rate, float(np.sqrt(squared_difference / squared_update))
    )
