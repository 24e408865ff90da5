"""Mixtral: Mistral with experts in place of the SwiGLU of every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.models.families.common import (
    ATTENTION_LAYER,
    ExpertNames,
    Family,
    decoder_shape,
    read_experts,
    refuse_sliding_window,
    refuse_unless,
)
from rl_megatron.models.shape import ModelShape


def _shape(config: Mapping[str, Any]) -> ModelShape:
    # Noise on the inputs of the router, in training only.
    refuse_unless(config, "router_jitter_noise", 0.0)
    experts = read_experts(
        config,
        intermediate_size="intermediate_size",
        num_experts=8,
        experts_per_token=2,
        renormalise=True,
    )
    config = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, **config}
    shape = decoder_shape(config, key_value_heads=8, experts=experts)
    refuse_sliding_window(config.get("sliding_window"), shape.max_position_embeddings)
    return shape


MIXTRAL = Family(
    _shape,
    ATTENTION_LAYER,
    ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
)
