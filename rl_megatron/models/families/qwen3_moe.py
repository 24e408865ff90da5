"""Qwen3-MoE: Qwen3 with experts in place of the SwiGLU of every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.errors import CheckpointError
from rl_megatron.models.families.common import (
    ATTENTION_LAYER,
    ExpertNames,
    Family,
    decoder_shape,
    read_experts,
    refuse_unless,
)
from rl_megatron.models.families.qwen2 import refuse_qwen_sliding_window
from rl_megatron.models.families.qwen3 import HEAD_NORMS
from rl_megatron.models.shape import ModelShape


def _shape(config: Mapping[str, Any]) -> ModelShape:
    refuse_unless(config, "decoder_sparse_step", 1)
    if config.get("mlp_only_layers"):
        raise CheckpointError(
            f"config.json: mlp_only_layers {config['mlp_only_layers']} is not implemented: every "
            "layer must have experts. Use another model."
        )
    experts = read_experts(
        config,
        intermediate_size="moe_intermediate_size",
        num_experts=128,
        experts_per_token=8,
        renormalise=bool(config.get("norm_topk_prob", False)),
    )
    shape = decoder_shape(config, key_value_heads=4, qk_norm=True, experts=experts)
    refuse_qwen_sliding_window(config, shape)
    return shape


QWEN3_MOE = Family(
    _shape,
    (*ATTENTION_LAYER, *HEAD_NORMS),
    ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
)
