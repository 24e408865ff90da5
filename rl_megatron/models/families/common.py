"""What the families share: reading a config.json key by key, and expanding a table of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces.weights import Split, WeightRule
from rl_megatron.models.rope import parse_rope
from rl_megatron.models.shape import ModelShape
from rl_megatron.models.split import GateUp, Qkv, Replicated, Sliced, Vocab


@dataclass(frozen=True)
class Row:
    """One line of a family's table; `{i}` is the layer, counted over the whole model.

    Attributes:
        hf: Hugging Face names.
        megatron: Megatron name.
        split: The split rule, from the shape of the model.
    """

    hf: tuple[str, ...]
    megatron: str
    split: Callable[[ModelShape], Split]


@dataclass(frozen=True)
class Family:
    """One kind of model.

    Attributes:
        shape: The numbers of a model, from its config.json; raises CheckpointError for a setting
            that is not implemented.
        layer: Table of the weights of one decoder layer.
    """

    shape: Callable[[Mapping[str, Any]], ModelShape]
    layer: tuple[Row, ...]

    def weight_rules(
        self, shape: ModelShape, make_vocab_size_divisible_by: int
    ) -> tuple[WeightRule, ...]:
        """Every parameter of the model: embedding, layer by layer, final norm, head."""
        hidden = shape.hidden_size
        vocab = Vocab(shape.vocab_size, hidden, make_vocab_size_divisible_by)
        embedding = ("model.embed_tokens.weight",)
        head = embedding if shape.tie_word_embeddings else ("lm_head.weight",)
        layers = (
            WeightRule(
                tuple(name.format(i=i) for name in row.hf),
                row.megatron.format(i=i),
                row.split(shape),
            )
            for i in range(shape.num_layers)
            for row in self.layer
        )
        return (
            WeightRule(embedding, "embedding.word_embeddings.weight", vocab),
            *layers,
            WeightRule(
                ("model.norm.weight",), "decoder.final_layernorm.weight", Replicated((hidden,))
            ),
            WeightRule(head, "output_layer.weight", vocab, is_copy=shape.tie_word_embeddings),
        )


def _norm(shape: ModelShape) -> Split:
    return Replicated((shape.hidden_size,))


def head_norm(shape: ModelShape) -> Split:
    """The split of a norm over one head's width."""
    return Replicated((shape.head_dim,))


def _qkv(shape: ModelShape, trailing: tuple[int, ...]) -> Split:
    return Qkv(shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, trailing)


def _qkv_weight(shape: ModelShape) -> Split:
    return _qkv(shape, (shape.hidden_size,))


def qkv_bias(shape: ModelShape) -> Split:
    """The split of the fused query, key and value bias."""
    return _qkv(shape, ())


def _attention_output(shape: ModelShape) -> Split:
    return Sliced((shape.hidden_size, shape.num_attention_heads * shape.head_dim), dim=1)


def _gate_up(shape: ModelShape) -> Split:
    return GateUp(shape.intermediate_size, shape.hidden_size)


def _down(shape: ModelShape) -> Split:
    return Sliced((shape.hidden_size, shape.intermediate_size), dim=1)


_HF = "model.layers.{i}."
_MEGATRON = "decoder.layers.{i}."

DECODER_LAYER = (
    Row((_HF + "input_layernorm.weight",), _MEGATRON + "input_layernorm.weight", _norm),
    Row(
        tuple(_HF + f"self_attn.{name}_proj.weight" for name in "qkv"),
        _MEGATRON + "self_attention.linear_qkv.weight",
        _qkv_weight,
    ),
    Row(
        (_HF + "self_attn.o_proj.weight",),
        _MEGATRON + "self_attention.linear_proj.weight",
        _attention_output,
    ),
    Row((_HF + "post_attention_layernorm.weight",), _MEGATRON + "pre_mlp_layernorm.weight", _norm),
    Row(
        (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
        _MEGATRON + "mlp.linear_fc1.weight",
        _gate_up,
    ),
    Row((_HF + "mlp.down_proj.weight",), _MEGATRON + "mlp.linear_fc2.weight", _down),
)
"""RMSNorm before grouped-query attention and before SwiGLU: the layer all families start from."""


def decoder_shape(
    config: Mapping[str, Any],
    *,
    key_value_heads: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> ModelShape:
    """The numbers of a decoder.

    Args:
        config: The whole config.json.
        key_value_heads: Where the config names none (None: as many as query heads).
        head_dim: Where the config names none (None: hidden_size / num_attention_heads).
        qkv_bias: Query, key and value projections have biases.
        qk_norm: Query and key heads are normalised.

    Raises:
        CheckpointError: A key is missing, or has a value that is not implemented.
    """
    _refuse_unless(config, "hidden_act", "silu")
    _refuse_unless(config, "attention_bias", False)
    _refuse_unless(config, "mlp_bias", False)
    heads, hidden = positive(config, "num_attention_heads"), positive(config, "hidden_size")
    groups = positive(config, "num_key_value_heads", key_value_heads or heads)
    if heads % groups:
        raise CheckpointError(
            f"config.json: num_key_value_heads ({groups}) must divide num_attention_heads ({heads})"
        )
    return ModelShape(
        family=config["model_type"],
        num_layers=positive(config, "num_hidden_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=positive(config, "head_dim", head_dim or hidden // heads),
        intermediate_size=positive(config, "intermediate_size"),
        vocab_size=positive(config, "vocab_size"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=parse_rope(config),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position_embeddings=positive(config, "max_position_embeddings"),
        initializer_range=float(config.get("initializer_range", 0.02)),
    )


def positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of at least 1; null counts as not given."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(
            f"config.json: {key} must be a whole number of at least 1, found {value!r}. "
            "Is the file complete, and a language model's?"
        )
    return value


def refuse_sliding_window(window: int | None, max_position_embeddings: int) -> None:
    """Raises CheckpointError if a window is shorter than the sequences the model was made for."""
    if window is not None and window < max_position_embeddings:
        raise CheckpointError(
            f"config.json: sliding_window {window} is not implemented, and would act on sequences "
            f"up to max_position_embeddings {max_position_embeddings}. Set max_position_embeddings "
            "to the window if no sequence of yours is longer, or use a model without a window."
        )


def _refuse_unless(config: Mapping[str, Any], key: str, expected: object) -> None:
    value = config.get(key, expected)
    if value != expected:
        raise CheckpointError(
            f"config.json: {key} {value!r} is not implemented, only {expected!r}. "
            "Use another model, or add a family."
        )
