"""Hugging Face safetensors -> the tensors of one rank's Megatron stage, read slice by slice.

q, k, v are one matrix, and so are gate and up, each rank's rows one after the other: `megatron_attention` splits them
again, where Megatron's own order would take q, k and v apart by groups of heads. The vocabulary is zero-padded to a
multiple of tp; the loss masks those columns. Logits then equal transformers' to float32 rounding for Llama (GQA), Qwen2
(bias, tied embeddings) and Qwen3 (q/k norm).
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from training.adapters import FUSED_TARGETS
from training.base_model import BaseModel, BaseModelError, module_name
from training.layout import Stage


def padded_vocab_size(base: BaseModel, tp: int) -> int:
    """Vocabulary rounded up to a multiple of tp."""
    return -(-base.vocab_size // tp) * tp


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite. NaN and infinity show in the extremes, which take one fast pass.

    torch.isfinite over the tensor takes fifty times as long: minutes for a model of 7B.
    """
    return not tensor.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


class StageWeights:
    """Reads one rank's part of the base model; `stage_tensors` names them as Megatron does."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.base = stage.base
        self.tp = stage.tp
        self.tp_rank = stage.tp_rank
        self._files: dict[Path, object] = {}

    def stage_tensors(self) -> dict[str, Tensor]:
        """Megatron parameter name -> tensor, for the layers of this stage (and embedding and head at the ends)."""
        tensors: dict[str, Tensor] = {}
        if self.stage.position.is_first_stage:
            tensors["embedding.word_embeddings.weight"] = self._vocab_rows("model.embed_tokens.weight")
        if self.stage.position.is_last_stage:
            tensors["decoder.final_layernorm.weight"] = self._whole("model.norm.weight")
            if not (self.base.tied_embeddings and self.stage.position.is_first_stage):
                head = "model.embed_tokens.weight" if self.base.tied_embeddings else "lm_head.weight"
                tensors["output_layer.weight"] = self._vocab_rows(head)
        for index, layer in enumerate(self.stage.layers):
            for name, tensor in self._layer_tensors(layer).items():
                tensors[f"decoder.layers.{index}.{name}"] = tensor
        return tensors

    def _layer_tensors(self, layer: int) -> dict[str, Tensor]:
        def part(target: str, suffix: str = "weight", dim: int = 0) -> Tensor:
            return self._part(f"{module_name(layer, target)}.{suffix}", dim)

        def fused(kind: str, suffix: str = "weight") -> Tensor:
            return torch.cat([part(target, suffix) for target in FUSED_TARGETS[kind]])

        prefix = f"model.layers.{layer}."
        tensors = {
            "self_attention.linear_qkv.weight": fused("linear_qkv"),
            "self_attention.linear_proj.weight": part("o_proj", dim=1),
            "mlp.linear_fc1.weight": fused("linear_fc1"),
            "mlp.linear_fc2.weight": part("down_proj", dim=1),
            "input_layernorm.weight": self._whole(prefix + "input_layernorm.weight"),
            "pre_mlp_layernorm.weight": self._whole(prefix + "post_attention_layernorm.weight"),
        }
        if self.base.has_qkv_bias:
            tensors["self_attention.linear_qkv.bias"] = fused("linear_qkv", "bias")
        if self.base.has_qk_norm:
            tensors["self_attention.q_layernorm.weight"] = self._whole(prefix + "self_attn.q_norm.weight")
            tensors["self_attention.k_layernorm.weight"] = self._whole(prefix + "self_attn.k_norm.weight")
        return tensors

    def _vocab_rows(self, name: str) -> Tensor:
        rows = padded_vocab_size(self.base, self.tp) // self.tp
        start = min(self.tp_rank * rows, self.base.vocab_size)
        stop = min(start + rows, self.base.vocab_size)
        tensor = self._finite(name, self._slice(name)[start:stop])
        return F.pad(tensor, (0, 0, 0, rows - tensor.shape[0]))

    def _part(self, name: str, dim: int) -> Tensor:
        tensor = self._slice(name)
        size = tensor.get_shape()[dim] // self.tp
        start = self.tp_rank * size
        return self._finite(name, tensor[start : start + size] if dim == 0 else tensor[:, start : start + size])

    def _whole(self, name: str) -> Tensor:
        return self._finite(name, self._slice(name)[:])

    def _finite(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor. Raises BaseModelError for one with a NaN; each rank looks at the part that it reads."""
        if not is_finite(tensor):
            raise BaseModelError(
                f"{self.base.tensor_files[name]}: tensor {name} has a value that is not finite; the file is damaged or "
                "the model diverged: put a sound one in its place"
            )
        return tensor

    def _slice(self, name: str):
        path = self.base.tensor_files[name]
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt")
        return self._files[path].get_slice(name)
