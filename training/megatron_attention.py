"""What replaces Megatron's own: attention and norm, which need a GPU or refuse our settings; the order of q, k, v."""

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

HALF_BYTES = 2  # flash attention knows 16-bit numbers only
CAUSAL = (-1, 0)  # window: all before, nothing after


class PlainSelfAttention(SelfAttention):
    """Megatron's self-attention whose fused q, k, v lie one after the other, each with its heads in order.

    So a target's outputs are adjacent columns, as an adapter's B wants them, and splitting copies nothing.
    """

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_args, **_kwargs) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_TBD -> query_TBHK, key_TBGK, value_TBGK, H query and G key-value heads of this rank, width K."""
        mixed, _bias = self.linear_qkv(hidden_states)
        heads = mixed.unflatten(-1, (-1, self.hidden_size_per_attention_head))
        num_kv = self.num_query_groups_per_partition
        query, key, value = heads.split((self.num_attention_heads_per_partition, num_kv, num_kv), 2)
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value


class CausalAttention(nn.Module):
    """Core attention through PyTorch's scaled dot product.

    In a padded chunk pads stand on the right, so causality alone hides them. In a packed one every segment is computed
    by itself: no sequence can see another, and packed equals alone to the last bit. On a GPU with 16-bit numbers one
    flash attention kernel takes all segments.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_ignored):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_args, packed_seq_params, **_kwargs) -> Tensor:
        """Context of the queries; Megatron's mask arguments are unused.

        Padded: query_TBHK, key_TBGK, value_TBGK (G key-value heads) -> context_TBD. Packed: query_THK, key_TGK,
        value_TGK -> context_THK.
        """
        if packed_seq_params.segments is None:
            query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(query, key, value).permute(2, 0, 1, 3).flatten(2)
        if query.is_cuda and query.dtype.itemsize == HALF_BYTES:
            ends, longest = packed_seq_params.segment_ends, packed_seq_params.max_seqlen_q
            return varlen_attn(
                query,
                key,
                value,
                ends,
                ends,
                longest,
                longest,
                scale=self.softmax_scale,
                window_size=CAUSAL,
                enable_gqa=True,
            )
        return self._by_segment(query, key, value, packed_seq_params.segments)

    def _by_segment(self, query: Tensor, key: Tensor, value: Tensor, segments: tuple[int, ...]) -> Tensor:
        parts = zip(*(x.transpose(0, 1).split(segments, 1) for x in (query, key, value)), strict=True)
        contexts = [self._attend(*(part[None] for part in segment))[0] for segment in parts]
        return torch.cat(contexts, 1).transpose(0, 1)

    def _attend(self, query_BHTK: Tensor, key_BGTK: Tensor, value_BGTK: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query_BHTK, key_BGTK, value_BGTK, is_causal=True, enable_gqa=True, scale=self.softmax_scale
        )


class FrozenRMSNorm(nn.RMSNorm):
    """RMS norm in the signature that Megatron's layer specs call."""

    def __init__(self, config, hidden_size, eps=1e-5, **_ignored):
        super().__init__(hidden_size, eps=eps)
