"""Llama 2 and 3.x, SmolLM2; and Mistral, which is the same with a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.models.families.common import (
    DECODER_LAYER,
    Family,
    decoder_shape,
    refuse_sliding_window,
)
from rl_megatron.models.shape import ModelShape


def _mistral_shape(config: Mapping[str, Any]) -> ModelShape:
    shape = decoder_shape(config, key_value_heads=8)
    refuse_sliding_window(config.get("sliding_window"), shape.max_position_embeddings)
    return shape


LLAMA = Family(decoder_shape, DECODER_LAYER)
MISTRAL = Family(_mistral_shape, DECODER_LAYER)
