"""The numbers that make a model: everything that is built or converted is built from these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

RopeScaling = Literal["none", "linear", "llama3"]


@dataclass(frozen=True)
class RopeSettings:
    """How positions become rotation angles.

    Attributes:
        theta: Base wavelength.
        scaling: "none"; "linear" (all angles divided by `factor`); "llama3" (Llama 3.1: long
            wavelengths divided by `factor`, short ones kept, a smooth ramp between).
        factor: Divisor of the angles.
        low_freq_factor, high_freq_factor: llama3: wavelengths above `original_max_position /
            low_freq_factor` are scaled, below `original_max_position / high_freq_factor` kept.
        original_max_position: llama3: context length before the extension.
    """

    theta: float
    scaling: RopeScaling = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True)
class ExpertShape:
    """The experts of every layer, each a SwiGLU of its own.

    Attributes:
        num_experts: Of one layer.
        experts_per_token: How many a token is sent to: those with the largest router logits.
        intermediate_size: Width of the gate (and of the up) projection of one expert.
        renormalise: The weights of a token's experts are divided by their sum.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    renormalise: bool


@dataclass(frozen=True)
class ModelShape:
    """A decoder with RMSNorm, SwiGLU, rotary positions and grouped-query attention.

    Attributes:
        family: `model_type` of the Hugging Face config; key of `FAMILIES`.
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads; divides the query heads.
        head_dim: Width of one head; `num_attention_heads * head_dim` need not be `hidden_size`.
        intermediate_size: Width of the gate (and of the up) projection of a layer without experts.
        vocab_size: Rows of the embedding in the Hugging Face files, padding not counted.
        norm_eps: Added to the mean square in every RMSNorm.
        rope: How positions become angles.
        qkv_bias: Query, key and value projections have biases.
        qk_norm: Every query and key head is normalised before the rotation.
        tie_word_embeddings: The head is the embedding.
        max_position_embeddings: Longest sequence the model was made for.
        initializer_range: Standard deviation of fresh weights.
        experts: In place of the one SwiGLU of every layer; None in a dense model.
        scalar_head: A reward model: its head has one row, and is never the embedding.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    rope: RopeSettings
    qkv_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    initializer_range: float
    experts: ExpertShape | None = None
    scalar_head: bool = False


@dataclass(frozen=True)
class ModelOutline:
    """A language model, or a reward model, as far as its config.json tells without a family.

    Attributes:
        family: `model_type` of the config.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the last hidden states.
        initializer_range: Standard deviation of fresh weights.
        scalar_head: A reward model.
        settings: Everything in the config that may change a log-prob.
    """

    family: str
    vocab_size: int
    hidden_size: int
    initializer_range: float
    scalar_head: bool
    settings: Mapping[str, Any]
