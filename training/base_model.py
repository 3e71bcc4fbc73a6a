"""The frozen base model as its Hugging Face folder describes it: architecture, dimensions, tensor names.

Reads config.json and the headers of the safetensors files; no torch. Supported: Llama, Mistral, Qwen2, Qwen3 decoders
with full attention. Anything that Megatron-core would compute differently from transformers is refused here.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open

from planning.errors import InputError
from planning.types import ModelShape
from training.config import ATTENTION_TARGETS, BaseModelConfig, DType

SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
FLOATS = ("F32", "BF16", "F16")
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class BaseModelError(InputError):
    """The base model folder is incomplete, damaged, or of an architecture that is not supported."""


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Canonical shape of one projection: `num_out` x `num_in`; column-parallel targets split `num_out` over tp."""

    num_out: int
    num_in: int
    column_parallel: bool


@dataclass(frozen=True)
class BaseModel:
    """One Hugging Face decoder folder. Attributes follow config.json."""

    folder: Path
    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_llama3_factor: float | None
    tied_embeddings: bool

    @property
    def has_qkv_bias(self) -> bool:
        return self.architecture == "qwen2"

    @property
    def has_qk_norm(self) -> bool:
        return self.architecture == "qwen3"

    def shape(self, dtype: DType) -> ModelShape:
        """The dimensions that planning needs."""
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_size=self.ffn_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            tied_embeddings=self.tied_embeddings,
            bytes_per_parameter=4 if dtype is DType.FLOAT32 else 2,
        )

    def target_shape(self, target: str) -> TargetShape:
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": TargetShape(query, self.hidden_size, True),
            "k_proj": TargetShape(key, self.hidden_size, True),
            "v_proj": TargetShape(key, self.hidden_size, True),
            "o_proj": TargetShape(self.hidden_size, query, False),
            "gate_proj": TargetShape(self.ffn_size, self.hidden_size, True),
            "up_proj": TargetShape(self.ffn_size, self.hidden_size, True),
            "down_proj": TargetShape(self.hidden_size, self.ffn_size, False),
        }[target]

    def num_adapter_parameters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Parameters of one adapter over all layers."""
        shapes = [self.target_shape(target) for target in targets]
        return self.num_layers * rank * sum(shape.num_out + shape.num_in for shape in shapes)

    @cached_property
    def tensor_files(self) -> dict[str, Path]:
        """Name of every tensor -> the safetensors file that holds it."""
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            return {name: self.folder / file for name, file in _weight_map(index).items()}
        single = self.folder / "model.safetensors"
        if not single.exists():
            hint = ""
            if any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pt")):
                hint = "; pickled weights are refused, convert them with save_pretrained(safe_serialization=True)"
            raise BaseModelError(f"base_model.path {self.folder}: no model.safetensors{hint}")
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)

    def expected_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor of this architecture."""
        hidden = self.hidden_size
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        yield "model.norm.weight", (hidden,)
        if not self.tied_embeddings:
            yield "lm_head.weight", (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            yield prefix + "input_layernorm.weight", (hidden,)
            yield prefix + "post_attention_layernorm.weight", (hidden,)
            for target in (*ATTENTION_TARGETS, "gate_proj", "up_proj", "down_proj"):
                shape = self.target_shape(target)
                yield module_name(layer, target) + ".weight", (shape.num_out, shape.num_in)
                if self.has_qkv_bias and target in ("q_proj", "k_proj", "v_proj"):
                    yield module_name(layer, target) + ".bias", (shape.num_out,)
            if self.has_qk_norm:
                yield prefix + "self_attn.q_norm.weight", (self.head_dim,)
                yield prefix + "self_attn.k_norm.weight", (self.head_dim,)

    def check_weights(self) -> None:
        """Every expected tensor is there with its shape and no other (a tied lm_head and rope buffers may stand).

        Raises BaseModelError with the first tensor that is missing, extra, or of a wrong shape or number format.
        """
        expected = dict(self.expected_tensors())
        missing = sorted(set(expected) - set(self.tensor_files))
        if missing:
            raise BaseModelError(
                f"base_model.path {self.folder}: tensor {missing[0]} is missing ({len(missing)} in all)"
            )
        allowed = {"lm_head.weight"} if self.tied_embeddings else set()
        extra = sorted(
            name
            for name in set(self.tensor_files) - set(expected) - allowed
            if not name.endswith("rotary_emb.inv_freq")
        )
        if extra:
            raise BaseModelError(
                f"base_model.path {self.folder}: unknown tensor {extra[0]} ({len(extra)} in all); "
                f"is this really a plain {self.architecture} model?"
            )
        for path in sorted(set(self.tensor_files.values())):
            names = {name for name, own in self.tensor_files.items() if own == path}
            with _open(path) as file:
                absent = sorted(names - set(file.keys()))
                if absent:
                    raise BaseModelError(f"{path}: tensor {absent[0]} is not in it, but the index says so")
                for name in sorted(names & set(expected)):
                    _check_tensor(f"{path}: tensor {name}", file.get_slice(name), expected[name])


def _check_tensor(where: str, tensor: Any, shape: tuple[int, ...]) -> None:
    found = tuple(tensor.get_shape())
    if found != shape:
        raise BaseModelError(f"{where} has shape {found}, but config.json says {shape}")
    if tensor.get_dtype() not in FLOATS:
        raise BaseModelError(f"{where} is of type {tensor.get_dtype()}; give float weights: {', '.join(FLOATS)}")


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file beside the index. Raises BaseModelError for another content, or a file of another folder."""
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elsewhere = [file for file in weight_map.values() if Path(file).name != file]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BaseModelError(f"{index}: not an index of safetensors files: {error!r}; copy it again") from error
    if elsewhere:
        raise BaseModelError(f"{index}: {elsewhere[0]!r} lies in another folder; put all weight files beside the index")
    return weight_map


def module_name(layer: int, target: str) -> str:
    """Hugging Face name of a projection, e.g. model.layers.3.self_attn.q_proj."""
    block = "self_attn" if target in ATTENTION_TARGETS else "mlp"
    return f"model.layers.{layer}.{block}.{target}"


def peft_name(layer: int, target: str, matrix: str) -> str:
    """Name of an adapter's matrix ("A" or "B") in an adapter_model.safetensors that peft loads."""
    return f"base_model.model.{module_name(layer, target)}.lora_{matrix}.weight"


def read_base_model(config: BaseModelConfig) -> BaseModel:
    """Read and judge config.json. Raises BaseModelError when the folder or the architecture cannot be trained."""
    folder = config.path
    if not folder.is_dir():
        raise BaseModelError(f"base_model.path {folder}: no such folder; give a local Hugging Face model folder")
    try:
        raw = json.loads((folder / "config.json").read_text())
    except FileNotFoundError as error:
        raise BaseModelError(f"base_model.path {folder}: config.json is missing") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BaseModelError(f"base_model.path {folder}: config.json is not JSON: {error}") from error
    architecture = raw.get("model_type")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise BaseModelError(
            f"base_model.path {folder}: architecture {architecture!r} is not supported; "
            f"choose one of {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    _refuse_unsupported(folder, raw)
    try:
        return BaseModel(
            folder=folder,
            architecture=architecture,
            num_layers=raw["num_hidden_layers"],
            hidden_size=raw["hidden_size"],
            ffn_size=raw["intermediate_size"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            vocab_size=raw["vocab_size"],
            max_positions=raw["max_position_embeddings"],
            norm_eps=raw["rms_norm_eps"],
            rope_theta=raw.get("rope_theta") or (raw.get("rope_parameters") or {}).get("rope_theta") or 10000.0,
            rope_llama3_factor=_rope_factor(folder, raw),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise BaseModelError(f"base_model.path {folder}: config.json lacks the key {error.args[0]!r}") from error


def _refuse_unsupported(folder: Path, raw: dict[str, object]) -> None:
    where = f"base_model.path {folder}: "
    architecture = raw["model_type"]
    if architecture != "qwen2" and (raw.get("attention_bias") or raw.get("mlp_bias")):
        raise BaseModelError(where + "biases on attention or MLP projections are not supported")
    sliding = raw.get("sliding_window") if architecture == "mistral" else raw.get("use_sliding_window")
    if sliding or "sliding_attention" in (raw.get("layer_types") or ()):  # type: ignore[operator]
        raise BaseModelError(where + "sliding window attention is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise BaseModelError(where + f"activation {raw['hidden_act']!r} is not supported; only silu is")
    if raw.get("quantization_config"):
        raise BaseModelError(where + "a quantised base model is not supported; give the float weights")


def _rope_factor(folder: Path, raw: dict[str, object]) -> float | None:
    """Scaling factor of Llama-3 rope, or None for plain rope; Megatron-core knows no other scaling."""
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    assert isinstance(scaling, dict)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3" or any(scaling.get(key) != value for key, value in LLAMA3_ROPE.items()):
        raise BaseModelError(
            f"base_model.path {folder}: rope scaling {scaling} is not supported; only llama3 with {LLAMA3_ROPE} is"
        )
    return float(scaling["factor"])


def _open(path: Path):  # type: ignore[no-untyped-def]
    try:
        return safe_open(path, framework="numpy")
    except (OSError, ValueError) as error:
        raise BaseModelError(f"{path}: cannot be read: {error}") from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise BaseModelError(f"{path}: not a valid safetensors file: {error}") from error
