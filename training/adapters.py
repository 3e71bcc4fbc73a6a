"""One tenant's LoRA adapter as one rank holds it, and the canonical form that every layout shares.

Canonical: per Hugging Face module A [rank, in] and B [out, rank], float32. Local, so that the split axis is dim 0:
  column-parallel (q k v gate up): A [rank, in] replicated,     B [out/tp, rank] split
  row-parallel (o down):           A^T [in/tp, rank] split,     B [out, rank] replicated
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor, nn

from training.base_model import BaseModel, module_name, peft_name
from training.config import ALL_TARGETS, AdapterConfig, TenantConfig
from training.initial_adapter import WEIGHTS_FILE
from training.layout import Stage

FUSED_TARGETS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's layers -> the modules of Hugging Face that each holds, in the order of its output rows."""


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

    def local_shape(self, tp: int) -> tuple[int, int]:
        """Shape of a local tensor of a layer on `tp` tensor-parallel ranks."""
        rows, columns = self.stored_shape
        return (rows // tp if self.is_split else rows), columns

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
    """One tenant's local adapter tensors on one rank, and their gradients: two flat buffers with the same order.

    First everything that is replicated over tensor parallelism, then what is split; in each part by layer, matrix and
    target. So A of the targets of one fused layer are rows of one matrix, and an update, a norm or a reduction takes a
    few calls rather than two per module.
    """

    def __init__(
        self, tenant: str, config: AdapterConfig, stage: Stage, canonical: Callable[[TensorKey], Tensor]
    ) -> None:
        """`canonical` gives each tensor in canonical form; the rank keeps its own part of it."""
        self.tenant = tenant
        self.config = config
        self.stage = stage
        self.best: dict[TensorKey, Tensor] = {}  # copies (CPU) at the lowest evaluation loss, where they are kept
        keys = sorted(tensor_keys(config, stage.layers), key=self._storage_order)
        self.ranges: dict[TensorKey, tuple[int, int]] = {}  # offset and size in the flat buffers, in their order
        offset = 0
        for key in keys:
            size = math.prod(self._local_shape(key))
            self.ranges[key] = (offset, size)
            offset += size
        self.num_replicated = sum(size for key, (_, size) in self.ranges.items() if not self.place(key).is_split)
        local = {key: self.place(key).to_local(canonical(key), stage.tp, stage.tp_rank) for key in keys}
        self.values = nn.Parameter(self.flattened(local))
        self.gradient = torch.zeros_like(self.values)
        self.values.grad = self.gradient
        self.parameters = self.views(self.values.detach())
        self.gradients = self.views(self.gradient)

    def flattened(self, local: Mapping[TensorKey, Tensor]) -> Tensor:
        """Local tensors -> one flat buffer on the rank's device."""
        return torch.cat([local[key].reshape(-1) for key in self.ranges]).to(self.stage.device)

    def views(self, flat: Tensor) -> dict[TensorKey, Tensor]:
        """The local tensors in a flat buffer, in the order of `tensor_keys`, which every rank uses."""
        keys = tensor_keys(self.config, self.stage.layers)
        return {key: flat.narrow(0, *self.ranges[key]).view(self._local_shape(key)) for key in keys}

    def rows(self, flat: Tensor, keys: Sequence[TensorKey]) -> Tensor:
        """Tensors that lie next to each other in a flat buffer, as one matrix with the rows of all."""
        start = self.ranges[keys[0]][0]
        stop = sum(self.ranges[keys[-1]])
        return flat[start:stop].view(-1, self._local_shape(keys[0])[1])

    def place(self, key: TensorKey) -> TensorPlace:
        return tensor_place(self.stage.base, self.config, key)

    def keep_best(self) -> None:
        """Remember the tensors as they are now."""
        self.best = {key: parameter.to("cpu", copy=True) for key, parameter in self.parameters.items()}

    def clear_gradients(self) -> None:
        self.gradient.zero_()

    def _local_shape(self, key: TensorKey) -> tuple[int, int]:
        return self.place(key).local_shape(self.stage.tp)

    def _storage_order(self, key: TensorKey) -> tuple:
        return self.place(key).is_split, key.layer, key.matrix, ALL_TARGETS.index(key.target)
