"""Qwen2 and Qwen2.5: biases on query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.models.families.common import (
    DECODER_LAYER,
    Family,
    Row,
    decoder_shape,
    positive,
    qkv_bias,
    refuse_sliding_window,
)
from rl_megatron.models.shape import ModelShape

LAYER = (
    *DECODER_LAYER,
    Row(
        tuple(f"model.layers.{{i}}.self_attn.{name}_proj.bias" for name in "qkv"),
        "decoder.layers.{i}.self_attention.linear_qkv.bias",
        qkv_bias,
    ),
)


def _shape(config: Mapping[str, Any]) -> ModelShape:
    shape = decoder_shape(config, key_value_heads=32, qkv_bias=True)
    refuse_qwen_sliding_window(config, shape)
    return shape


def refuse_qwen_sliding_window(config: Mapping[str, Any], shape: ModelShape) -> None:
    """Raises CheckpointError if a window acts: it must be switched on, and for some layer.

    `max_window_layers` layers at the bottom have no window; `layer_types`, where given, decides.
    """
    if not config.get("use_sliding_window", False):
        return
    layer_types = config.get("layer_types")
    if layer_types is None:
        some_layer = positive(config, "max_window_layers", 28) < shape.num_layers
    else:
        some_layer = "sliding_attention" in layer_types
    if some_layer:
        refuse_sliding_window(config.get("sliding_window", 4096), shape.max_position_embeddings)


QWEN2 = Family(_shape, LAYER)
