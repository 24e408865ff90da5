"""Tiny random models of architectures that Megatron does not have here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.helpers.tiny_model import make_tiny_tokenizer

_SIZES = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
# Dropout is on wherever a config has it: nothing may depend on it.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 5,
        "final_logit_softcapping": 2.0,
        "attn_logit_softcapping": 1.5,
    },
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "olmo2": {},
    "olmo": {},
    "phi": {"resid_pdrop": 0.3},
    "phi3": {"resid_pdrop": 0.3},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 2.0},
    "gpt_neox": {"attention_dropout": 0.3},
    "stablelm": {},
    # Latent attention, a dense layer before one with experts, and a buffer that is a weight.
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
    },
}


# Not to be trained packed, not to be sampled from, or not with attention of ours.
PECULIAR: dict[str, dict[str, Any]] = {
    "bert": {},
    "bloom": {"n_head": 4},
    "falcon": {"ffn_hidden_size": 48},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {
        "head_dim": 16,
        "num_local_experts": 4,
        "attention_chunk_size": 5,
        "intermediate_size_mlp": 48,
    },
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "rwkv": {"attention_hidden_size": 32},
}


def make_architecture(folder: Path, model_type: str, seed: int = 0, **settings: Any) -> Path:
    """`folder` with a random model and a tokenizer; see `tiny_architecture`."""
    tiny_architecture(model_type, seed, **settings).save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_architecture(model_type: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A random model of which no distribution is flat, in float32."""
    sizes = _SIZES | (ARCHITECTURES | PECULIAR)[model_type] | settings
    config = AutoConfig.for_model(model_type, **sizes)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            # Norms stay near 1 (or 0, where 1 is added to them).
            parameter += (0.25 if parameter.dim() > 1 else 0.1) * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.1 * torch.randn_like(buffer)
    return model.eval()
