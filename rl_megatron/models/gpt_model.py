"""A Megatron GPT as far as its last hidden states, and the configuration of its layers."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rl_megatron.models.attention import CoreAttention
from rl_megatron.models.balance import set_router
from rl_megatron.models.norm import RMSNorm
from rl_megatron.models.rope import inverse_frequencies
from rl_megatron.models.sequence import SequenceContext
from rl_megatron.models.shape import ModelShape
from rl_megatron.parallel import cpu_runtime
from rl_megatron.parallel.process import Process


def transformer_config(
    shape: ModelShape, process: Process, dtype: torch.dtype, recompute: str = "none"
) -> TransformerConfig:
    """Megatron's config of `shape` on the layout of `process`.

    `calculate_per_token_loss` makes Megatron sum gradients over micro-batches and data-parallel
    ranks and divide by nothing: our losses arrive already divided by their global denominators.
    """
    layout = process.layout
    interleaved = layout.virtual > 1
    first_stage_layers = layout.first_stage_layers
    if layout.pipeline == 2 and layout.last_stage_layers is not None:
        # It follows from the last one's, and Megatron divides by the number of other stages.
        first_stage_layers = None
    recompute_settings: dict[str, Any] = {}
    if recompute == "full":
        recompute_settings = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if interleaved else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        sequence_parallel=layout.sequence_parallel,
        num_layers_in_first_pipeline_stage=first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        # Batched p2p swaps forward and backward tensors when both neighbours are one rank.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        variable_seq_lengths=True,
        # The default refuses variable lengths, and sends every token to every rank.
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights always come from a checkpoint, but Megatron marks what is tensor-parallel while
        # it initialises; without the marks its gradient norm would count one shard only.
        perform_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **_expert_settings(shape),
        **recompute_settings,
    )


def _expert_settings(shape: ModelShape) -> dict[str, Any]:
    """What Megatron's config says of experts: no token is dropped. Balance is ours (balance.py)."""
    experts = shape.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.experts_per_token,
        "moe_ffn_hidden_size": experts.intermediate_size,
        # Softmax over the chosen experts alone is the renormalised softmax over all of them.
        "moe_router_pre_softmax": not experts.renormalise,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": _has_engine(),
    }


def _has_engine() -> bool:
    """Whether layers are Transformer Engine's."""
    return importlib.util.find_spec("transformer_engine") is not None and not cpu_runtime.needed()


def block_spec(shape: ModelShape, config: TransformerConfig, chunk: int | None) -> Any:
    """The modules of one chunk: Transformer Engine's on a GPU where installed, else Megatron's.

    The core attention is ours in both: it rotates, packs and caches. Beside Megatron's linear
    layers the norms are ours too.
    """
    num_experts = None if shape.experts is None else shape.experts.num_experts
    if _has_engine():
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts,
            moe_grouped_gemm=num_experts is not None,
            qk_layernorm=shape.qk_norm,
        )
        layer.submodules.self_attention.submodules.core_attention = CoreAttention
        if num_experts is not None:
            set_router(layer)
        return layer
    layer = get_gpt_layer_local_spec(
        num_experts=num_experts, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
    )
    modules = layer.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = RMSNorm
    if shape.qk_norm:
        modules.self_attention.submodules.q_layernorm = RMSNorm
        modules.self_attention.submodules.k_layernorm = RMSNorm
    modules.self_attention.submodules.core_attention = CoreAttention
    if num_experts is not None:
        set_router(layer)
    num_layers = get_num_layers_to_build(config, vp_stage=chunk)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


class HiddenStatesModel(GPTModel):
    """One pipeline chunk of a GPT that stops before its head, which a subclass calls."""

    def __init__(self, shape: ModelShape, process: Process, **kwargs: Any):
        super().__init__(position_embedding_type="none", parallel_output=True, **kwargs)
        self.shape = shape
        self.process = process
        # Not a module buffer: a bf16 model would cast it, and checkpoints have no use for it.
        self.inverse_frequencies = inverse_frequencies(shape.rope, shape.head_dim).to(
            process.device
        )

    def hidden_states(self, tokens: Tensor, context: SequenceContext) -> Tensor:
        """[T, 1, H], or this rank's part of the rows, from `tokens` [1, T]."""
        positions = torch.zeros_like(tokens)  # Rotary positions are in the context.
        hidden: Tensor = super().forward(tokens, positions, None, packed_seq_params=context)
        return hidden

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Megatron's seam between the last layer and the head: stop at the hidden states."""
        return hidden_states
