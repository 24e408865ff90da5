"""Qwen3: query and key heads are normalised, and head_dim is a number of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.models.families.common import (
    DECODER_LAYER,
    Family,
    Row,
    decoder_shape,
    head_norm,
)
from rl_megatron.models.families.qwen2 import refuse_qwen_sliding_window
from rl_megatron.models.shape import ModelShape

HEAD_NORMS = tuple(
    Row(
        (f"model.layers.{{i}}.self_attn.{name}_norm.weight",),
        f"decoder.layers.{{i}}.self_attention.{name}_layernorm.weight",
        head_norm,
    )
    for name in "qk"
)


def _shape(config: Mapping[str, Any]) -> ModelShape:
    shape = decoder_shape(config, key_value_heads=32, head_dim=128, qk_norm=True)
    refuse_qwen_sliding_window(config, shape)
    return shape


QWEN3 = Family(_shape, (*DECODER_LAYER, *HEAD_NORMS))
