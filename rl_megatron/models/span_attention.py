"""Causal attention within packed sequences, in blocks or by a kernel that takes all of them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from rl_megatron.models.spans import Block, VariableLength

# What the variable-length kernel computes in; it exists on a GPU only.
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


class InSpans(Protocol):
    """Which queries see which keys; see `make_blocks` and `as_variable_length`."""

    blocks: list[Block]
    restore: Tensor | None
    variable_length: VariableLength | None


def span_attention(
    query: Tensor, key: Tensor, value: Tensor, context: InSpans, scale: float
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
