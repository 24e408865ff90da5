"""Tiny random Hugging Face models with a tokenizer, of every family, that say something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "mixtral": MixtralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>")
PAD, EOS, BOS = range(3)


def make_tiny_hf(
    folder: Path,
    family: str = "llama",
    vocab_size: int = 131,
    layers: int = 2,
    tie: bool = False,
    rope: dict[str, Any] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    width: float = 0.25,
    scalar_head: bool = False,
    **settings: Any,
) -> Path:
    """`folder` with a random model and a tokenizer of one token per character.

    Weights, biases and norms are all random and wide enough that no distribution is flat. The
    odd vocabulary needs padding under any tensor parallelism. `rope`: e.g. `LLAMA3_ROPE`. `width`:
    standard deviation of the layers' matrices and biases; the larger, the sharper is attention,
    and the further are two float32 implementations apart (1e-5 and more at 0.25). `scalar_head`: a
    reward model. `settings`: more of the config's.
    """
    more: dict[str, Any] = {
        "llama": {"head_dim": 16},
        "mistral": {"sliding_window": None},
        "mixtral": {"num_local_experts": 8},
        "qwen3": {"head_dim": 16},
        "qwen3_moe": {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
        },
    }.get(family, {}) | settings
    config = CONFIGS[family](
        vocab_size=vocab_size,
        num_hidden_layers=layers,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tie,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default", **(rope or {})},
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **more,
    )
    if scalar_head:
        config.num_labels = 1
        model = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_((0.4 if "embed" in name or "head" in name else width) * noise)
    model.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character or newline; no token before a text."""
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *characters])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )
