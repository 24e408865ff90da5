"""The core attention of every layer: rotary embedding, packing, grouped heads and the cache.

Megatron's local attention knows neither packed sequences nor a cache for prompts of unequal
length. This module is put in its place in the layer spec, on every device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rl_megatron.models.sequence import SequenceContext
from rl_megatron.models.span_attention import span_attention
from rl_megatron.parallel.context import gather_keys


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, head_dim] by tables [T, head_dim], computed in fp32."""
    half = x.shape[-1] // 2
    x32 = x.float()
    turned = torch.cat([-x32[..., half:], x32[..., :half]], dim=-1)
    return (x32 * cos[:, None] + turned * sin[:, None]).to(x.dtype)


def cached_attention(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """Attention of one new token per sequence to its cached tokens and itself.

    Args:
        query: [n, heads, head_dim].
        keys, values: [n, max_tokens, kv_heads, head_dim], the new token included.
        positions: [n] position of the new token.
        scale: Factor of the scores.

    Returns:
        [n, heads, head_dim].
    """
    used = int(positions.max()) + 1
    k = keys[:, :used].transpose(1, 2)
    v = values[:, :used].transpose(1, 2)
    visible = torch.arange(used, device=query.device)[None] <= positions[:, None]
    block = scaled_dot_product_attention(
        query[:, :, None], k, v, attn_mask=visible[:, None, None], scale=scale, enable_gqa=True
    )
    return block[:, :, 0]


class CoreAttention(torch.nn.Module):
    """Core-attention module of Megatron's layer spec; takes a `SequenceContext`."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert attention_type == "self", f"{attention_type} attention"
        self.layer_number = layer_number
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: SequenceContext | None = None,
    ) -> Tensor:
        """[T, heads * head_dim] from query [T, heads, head_dim], key and value [T, kv_heads, .]."""
        context = packed_seq_params
        assert isinstance(context, SequenceContext), "the forward pass needs a SequenceContext"
        query = rotate(query, context.cos, context.sin)
        key = rotate(key, context.cos, context.sin)
        if context.split is not None:
            both = gather_keys(torch.stack([key, value], dim=1), context.split)
            key, value = both.unbind(dim=1)
        if context.cache is None:
            output = span_attention(query, key, value, context, self.scale)
        else:
            rows, positions = context.rows, context.positions
            assert rows is not None and positions is not None
            keys, values = context.cache.write(self.layer_number, rows, positions, key, value)
            if context.blocks:
                output = span_attention(query, key, value, context, self.scale)
            else:
                output = cached_attention(query, keys, values, positions, self.scale)
        return output.flatten(1)
