"""The frozen base model of one stage as a megatron.core GPTModel with our attention, norms and order of q, k, v."""

import warnings

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from training.layout import Stage
from training.megatron_attention import CausalAttention, FrozenRMSNorm, PlainSelfAttention
from training.weights import StageWeights, padded_vocab_size

FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def frozen_model(stage: Stage, groups: ProcessGroupCollection, dtype: torch.dtype) -> GPTModel:
    """The stage's model on the CPU, with its weights, none of which asks for a gradient."""
    model = _empty_model(stage, groups, dtype)
    _load(model, StageWeights(stage).stage_tensors())
    return model


def _empty_model(stage: Stage, groups: ProcessGroupCollection, dtype: torch.dtype) -> GPTModel:
    base, tp, pp = stage.base, stage.tp, groups.pp.size()
    config = TransformerConfig(
        num_layers=base.num_layers,
        hidden_size=base.hidden_size,
        num_attention_heads=base.num_heads,
        num_query_groups=base.num_kv_heads,
        kv_channels=base.head_dim,
        ffn_hidden_size=base.ffn_size,
        layernorm_epsilon=base.norm_eps,
        add_qkv_bias=base.has_qkv_bias,
        qk_layernorm=base.has_qk_norm,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=stage.splits_tokens,
        **(FULL_RECOMPUTE if stage.activations.recompute else {}),
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # demanded by variable_seq_lengths, also without experts
        batch_p2p_comm=stage.device != "cpu",  # without it pp uses the world group
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=base.has_qk_norm)
    parts = layer.submodules
    parts.self_attention.module = PlainSelfAttention
    parts.self_attention.submodules.core_attention = CausalAttention
    parts.input_layernorm = parts.pre_mlp_layernorm = FrozenRMSNorm
    if base.has_qk_norm:
        parts.self_attention.submodules.q_layernorm = FrozenRMSNorm
        parts.self_attention.submodules.k_layernorm = FrozenRMSNorm
    block = TransformerBlockSubmodules(layer_specs=[layer] * (base.num_layers // pp), layer_norm=FrozenRMSNorm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GPTModel(
            config,
            block,
            vocab_size=padded_vocab_size(base, tp),
            max_sequence_length=base.max_positions,
            position_embedding_type="rope",
            rotary_base=base.rope_theta,
            rope_scaling=base.rope_llama3_factor is not None,
            rope_scaling_factor=base.rope_llama3_factor or 8.0,
            pre_process=stage.position.is_first_stage,
            post_process=stage.position.is_last_stage,
            share_embeddings_and_output_weights=base.tied_embeddings,
            parallel_output=True,
            pg_collection=groups,
        )


def _load(model: GPTModel, tensors: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    if set(parameters) != set(tensors):
        raise RuntimeError(f"base weights and Megatron model differ in {sorted(set(parameters) ^ set(tensors))[:3]}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
            parameters[name].requires_grad_(False)
