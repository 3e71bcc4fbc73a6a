"""Attention and normalisation that replace Megatron's own, which need a GPU or refuse our settings."""

import torch.nn.functional as F
from torch import Tensor, nn


class CausalAttention(nn.Module):
    """Core attention through PyTorch's scaled dot product. Pads stand on the right, so causality alone hides them."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_ignored):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_args, **_kwargs) -> Tensor:
        """query_TBHK, key_TBGK, value_TBGK (G key-value heads) -> context_TBD. Megatron's mask arguments are unused."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True, scale=self.softmax_scale
        )
        return context.permute(2, 0, 1, 3).flatten(2)


class FrozenRMSNorm(nn.RMSNorm):
    """RMS norm in the signature that Megatron's layer specs call."""

    def __init__(self, config, hidden_size, eps=1e-5, **_ignored):
        super().__init__(hidden_size, eps=eps)
