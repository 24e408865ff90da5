"""The core attention of every layer: rotary embedding, packing, grouped heads and the cache.

Megatron's local attention knows neither packed sequences nor a cache for prompts of unequal
length. This module is put in its place in the layer spec, on every device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from rl_megatron.models.sequence import SequenceContext
from rl_megatron.models.spans import Block, VariableLength
from rl_megatron.parallel.context import gather_keys

# What the variable-length kernel computes in; it exists on a GPU only.
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, head_dim] by tables [T, head_dim], computed in fp32."""
    half = x.shape[-1] // 2
    x32 = x.float()
    turned = torch.cat([-x32[..., half:], x32[..., :half]], dim=-1)
    return (x32 * cos[:, None] + turned * sin[:, None]).to(x.dtype)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, context: SequenceContext, scale: float
) -> Tensor:
    """Causal attention within each packed sequence.

    Args:
        query: [T_local, heads, head_dim], this rank's tokens.
        key, value: [T, kv_heads, head_dim], all tokens; heads is a multiple of kv_heads.
        context: Which queries see which keys.
        scale: Factor of the scores, usually head_dim ** -0.5.

    Returns:
        [T_local, heads, head_dim].
    """
    if context.variable_length is not None and query.dtype in _KERNEL_DTYPES:
        return _variable_length_attention(query, key, value, context.variable_length, scale)
    parts = [
        _block_attention(query, key, value, block, scale)
        if block.offset == 0
        # Kept for the backward pass, the masks and keys of all blocks of a long sequence would
        # grow with the square of its length: they are made again instead.
        else checkpoint(
            _block_attention,
            query,
            key,
            value,
            block,
            scale,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for block in context.blocks
    ]
    return torch.cat(parts)[context.restore]


def _block_attention(
    query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float
) -> Tensor:
    """Outputs of the real queries of a block, [tokens, heads, head_dim]."""
    q = query[block.query].transpose(1, 2)
    k, v = (x[block.key].transpose(1, 2) for x in (key, value))
    mask = block.mask()
    output = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return output.transpose(1, 2)[block.real]


def _variable_length_attention(
    query: Tensor, key: Tensor, value: Tensor, spans: VariableLength, scale: float
) -> Tensor:
    """All spans in one call of torch's FlashAttention (Dao 2023)."""
    output: Tensor = varlen_attn(
        query[spans.query],
        key[spans.key],
        value[spans.key],
        spans.cu_query,
        spans.cu_key,
        spans.max_query,
        spans.max_key,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=True,
    )
    return output[spans.restore]


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
            output = packed_attention(query, key, value, context, self.scale)
        else:
            rows, positions = context.rows, context.positions
            assert rows is not None and positions is not None
            keys, values = context.cache.write(self.layer_number, rows, positions, key, value)
            if context.blocks:
                output = packed_attention(query, key, value, context, self.scale)
            else:
                output = cached_attention(query, keys, values, positions, self.scale)
        return output.flatten(1)
