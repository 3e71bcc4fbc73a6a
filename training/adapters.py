"""One tenant's LoRA adapter as one rank holds it, and the canonical form that every layout shares.

Canonical: per Hugging Face module A [rank, in] and B [out, rank], float32. Local, so that the split axis is dim 0:
  column-parallel (q k v gate up): A [rank, in] replicated,     B [out/tp, rank] split
  row-parallel (o down):           A^T [in/tp, rank] split,     B [out, rank] replicated
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor, nn

from training.base_model import BaseModel, module_name, peft_name
from training.config import AdapterConfig, TenantConfig
from training.initial_adapter import WEIGHTS_FILE
from training.layout import Stage


@dataclass(frozen=True, slots=True, order=True)
class TensorKey:
    """One adapter tensor: layer, target module and which of the two matrices ("A" or "B")."""

    layer: int
    target: str
    matrix: str

    @property
    def peft_name(self) -> str:
        """Name of the tensor in an adapter_model.safetensors that peft loads."""
        return peft_name(self.layer, self.target, self.matrix)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """How one adapter tensor lies on the ranks: its canonical shape, whether it is split, whether transposed."""

    shape: tuple[int, int]
    is_split: bool
    is_transposed: bool

    @property
    def stored_shape(self) -> tuple[int, int]:
        return (self.shape[1], self.shape[0]) if self.is_transposed else self.shape

    def to_local(self, canonical: Tensor, tp: int, tp_rank: int) -> Tensor:
        """Canonical tensor -> this tensor-parallel rank's local tensor, contiguous float32."""
        stored = canonical.t() if self.is_transposed else canonical
        local = stored.chunk(tp, 0)[tp_rank] if self.is_split else stored
        return local.to(torch.float32).contiguous().clone()

    def to_canonical(self, shards: list[Tensor]) -> Tensor:
        """Local tensors in tensor-parallel order (one if replicated) -> canonical tensor."""
        stored = torch.cat(shards, 0) if self.is_split else shards[0]
        return (stored.t() if self.is_transposed else stored).contiguous()


def tensor_place(base: BaseModel, adapter: AdapterConfig, key: TensorKey) -> TensorPlace:
    """Where a tensor of an adapter lies, for any layout."""
    target = base.target_shape(key.target)
    if key.matrix == "A":
        return TensorPlace((adapter.rank, target.num_in), not target.column_parallel, not target.column_parallel)
    return TensorPlace((target.num_out, adapter.rank), target.column_parallel, False)


def tensor_keys(adapter: AdapterConfig, layers: range) -> Iterator[TensorKey]:
    """All tensors of an adapter on some layers, in the order that every rank uses."""
    for layer in layers:
        for target in adapter.target_modules:
            for matrix in ("A", "B"):
                yield TensorKey(layer, target, matrix)


def initial_tensor(base: BaseModel, tenant: TenantConfig, key: TensorKey) -> Tensor:
    """The canonical tensor that training starts from: that of `adapter.initial_adapter`, or a drawn one.

    A from peft's default distribution, U(-1/sqrt(in), 1/sqrt(in)), seeded by (seed, module name); B zero.
    Kaiming-uniform with a = sqrt(5), as peft.tuners.lora draws it; independent of layout and of other tenants.
    """
    if tenant.adapter.initial_adapter is not None:
        with safe_open(tenant.adapter.initial_adapter / WEIGHTS_FILE, framework="pt") as file:
            return file.get_tensor(key.peft_name).float()
    shape = base.target_shape(key.target)
    if key.matrix == "B":
        return torch.zeros(shape.num_out, tenant.adapter.rank)
    digest = hashlib.sha256(f"{tenant.seed}/{module_name(key.layer, key.target)}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    bound = 1 / math.sqrt(shape.num_in)
    return torch.empty(tenant.adapter.rank, shape.num_in).uniform_(-bound, bound, generator=generator)


class Adapter:
    """One tenant's local adapter tensors on one rank."""

    def __init__(
        self, tenant: str, config: AdapterConfig, stage: Stage, canonical: Callable[[TensorKey], Tensor]
    ) -> None:
        """`canonical` gives each tensor in canonical form; the rank keeps its own part of it."""
        self.tenant = tenant
        self.config = config
        self.stage = stage
        self.parameters: dict[TensorKey, nn.Parameter] = {}
        self.best: dict[TensorKey, Tensor] = {}  # copies (CPU) at the lowest evaluation loss, where they are kept
        for key in tensor_keys(config, stage.layers):
            local = self.place(key).to_local(canonical(key), stage.tp, stage.tp_rank)
            self.parameters[key] = nn.Parameter(local.to(stage.device))

    def pair(self, layer: int, target: str) -> tuple[nn.Parameter, nn.Parameter] | None:
        """Local (A, B) of one module, or None if the adapter does not touch it."""
        matrix_a = self.parameters.get(TensorKey(layer, target, "A"))
        return None if matrix_a is None else (matrix_a, self.parameters[TensorKey(layer, target, "B")])

    def place(self, key: TensorKey) -> TensorPlace:
        return tensor_place(self.stage.base, self.config, key)

    def keep_best(self) -> None:
        """Remember the tensors as they are now."""
        self.best = {key: parameter.detach().to("cpu", copy=True) for key, parameter in self.parameters.items()}

    def clear_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
