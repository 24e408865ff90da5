"""What the families share: reading a config.json key by key, and expanding a table of weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces.weights import Split, WeightRule
from rl_megatron.models.fresh_head import SCORE
from rl_megatron.models.rope import parse_rope
from rl_megatron.models.shape import ExpertShape, ModelShape
from rl_megatron.models.split import GateUp, Qkv, Replicated, Sliced, Vocab

CLASSIFIER = "ForSequenceClassification"
"""How transformers' class of a reward model ends; what precedes it is the family."""


@dataclass(frozen=True)
class Row:
    """One line of a family's table; `{i}` is the layer and `{e}` the expert in the whole model.

    Attributes:
        hf: Hugging Face names.
        megatron: Megatron name.
        split: The split rule, from the shape of the model.
    """

    hf: tuple[str, ...]
    megatron: str
    split: Callable[[ModelShape], Split]


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls its experts, after `model.layers.{i}.`; the router is `{block}.gate`."""

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Family:
    """One kind of model.

    Attributes:
        shape: The numbers of a model, from its config.json; raises CheckpointError for a setting
            that is not implemented.
        layer: Table of the weights of one decoder layer, experts left out.
        experts: Names of the experts of a layer, if the family has any.
    """

    shape: Callable[[Mapping[str, Any]], ModelShape]
    layer: tuple[Row, ...]
    experts: ExpertNames | None = None

    def weight_rules(
        self, shape: ModelShape, make_vocab_size_divisible_by: int
    ) -> tuple[WeightRule, ...]:
        """Every parameter of the model: embedding, layer by layer, final norm, head."""
        hidden = shape.hidden_size
        vocab = Vocab(shape.vocab_size, hidden, make_vocab_size_divisible_by)
        embedding = ("model.embed_tokens.weight",)
        tied = shape.tie_word_embeddings
        head = WeightRule(
            embedding if tied else ("lm_head.weight",), "output_layer.weight", vocab, is_copy=tied
        )
        if shape.scalar_head:
            head = WeightRule((SCORE,), "output_layer.weight", Replicated((1, hidden)))
        layers = (rule for i in range(shape.num_layers) for rule in self._layer_rules(shape, i))
        return (
            WeightRule(embedding, "embedding.word_embeddings.weight", vocab),
            *layers,
            WeightRule(
                ("model.norm.weight",), "decoder.final_layernorm.weight", Replicated((hidden,))
            ),
            head,
        )

    def _layer_rules(self, shape: ModelShape, layer: int) -> Iterator[WeightRule]:
        """The table filled in for one layer; expert by expert after the rest."""
        yield from (_rule(row, shape, i=layer) for row in self.layer)
        if self.experts is not None:
            assert shape.experts is not None
            router, *expert = _expert_rows(self.experts, shape.experts)
            yield _rule(router, shape, i=layer)
            for e in range(shape.experts.num_experts):
                yield from (_rule(row, shape, i=layer, e=e) for row in expert)


def _rule(row: Row, shape: ModelShape, **numbers: int) -> WeightRule:
    names = tuple(name.format(**numbers) for name in row.hf)
    return WeightRule(names, row.megatron.format(**numbers), row.split(shape))


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

ATTENTION_LAYER = (
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
)
"""RMSNorm before grouped-query attention and before what follows it: all families start here."""

DECODER_LAYER = (
    *ATTENTION_LAYER,
    Row(
        (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
        _MEGATRON + "mlp.linear_fc1.weight",
        _gate_up,
    ),
    Row((_HF + "mlp.down_proj.weight",), _MEGATRON + "mlp.linear_fc2.weight", _down),
)
"""With one SwiGLU: the layer of dense families."""


def _expert_rows(names: ExpertNames, experts: ExpertShape) -> tuple[Row, ...]:
    """The router, then the table of expert `{e}`."""
    hf = _HF + names.block + ".experts.{e}."
    megatron = _MEGATRON + "mlp.experts.local_experts.{e}."
    return (
        Row(
            (_HF + names.block + ".gate.weight",),
            _MEGATRON + "mlp.router.weight",
            lambda shape: Replicated((experts.num_experts, shape.hidden_size)),
        ),
        Row(
            (f"{hf}{names.gate}.weight", f"{hf}{names.up}.weight"),
            megatron + "linear_fc1.weight",
            lambda shape: GateUp(experts.intermediate_size, shape.hidden_size),
        ),
        Row(
            (f"{hf}{names.down}.weight",),
            megatron + "linear_fc2.weight",
            lambda shape: Sliced((shape.hidden_size, experts.intermediate_size), dim=1),
        ),
    )


def decoder_shape(
    config: Mapping[str, Any],
    *,
    key_value_heads: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    experts: ExpertShape | None = None,
) -> ModelShape:
    """The numbers of a decoder.

    Args:
        config: The whole config.json.
        key_value_heads: Where the config names none (None: as many as query heads).
        head_dim: Where the config names none (None: hidden_size / num_attention_heads).
        qkv_bias: Query, key and value projections have biases.
        qk_norm: Query and key heads are normalised.
        experts: See `read_experts`.

    Raises:
        CheckpointError: A key is missing, or has a value that is not implemented.
    """
    refuse_unless(config, "hidden_act", "silu")
    refuse_unless(config, "attention_bias", False)
    refuse_unless(config, "mlp_bias", False)
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
        experts=experts,
        scalar_head=has_scalar_head(config),
    )


def has_scalar_head(config: Mapping[str, Any]) -> bool:
    """Whether it is a sequence classifier, which must have one label: a reward model."""
    classifiers = [n for n in config.get("architectures") or () if n.endswith(CLASSIFIER)]
    if not classifiers:
        return False
    labels = config.get("num_labels") or len(config.get("id2label") or ()) or 2
    if labels != 1:
        raise CheckpointError(
            f"config.json: {classifiers[0]} has {labels} labels (num_labels, id2label): a reward "
            "model gives one number. Use a model with num_labels 1."
        )
    return True


def read_experts(
    config: Mapping[str, Any],
    *,
    intermediate_size: str,
    num_experts: int,
    experts_per_token: int,
    renormalise: bool,
) -> ExpertShape:
    """The experts of a config.json.

    Args:
        config: The whole config.json. The number of experts goes by either of two names.
        intermediate_size: Name of the key that holds an expert's width.
        num_experts, experts_per_token: Where the config names none.
        renormalise: The weights of a token's experts are divided by their sum.

    Raises:
        CheckpointError: A number that is not possible, or not implemented.
    """
    found = positive(config, "num_experts", positive(config, "num_local_experts", num_experts))
    per_token = positive(config, "num_experts_per_tok", experts_per_token)
    if per_token > found:
        raise CheckpointError(
            f"config.json: num_experts_per_tok ({per_token}) exceeds the {found} experts. Is the "
            "file that of the model?"
        )
    if per_token == 1 and renormalise:
        raise CheckpointError(
            "config.json: num_experts_per_tok 1 with renormalised weights is not implemented: each "
            "weight would be 1, and the router would learn nothing. Use another model."
        )
    return ExpertShape(found, per_token, positive(config, intermediate_size), renormalise)


def read_config_json(hf_folder: Path) -> dict[str, Any]:
    """What the config.json in a folder says; CheckpointError, naming it, if it says nothing."""
    path = hf_folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{hf_folder} has no config.json: it must be a Hugging Face model folder."
        ) from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}. Copy it again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(config).__name__}.")
    return config


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


def refuse_unless(config: Mapping[str, Any], key: str, expected: object) -> None:
    """Raises CheckpointError if a setting has another value than the one that is implemented."""
    value = config.get(key, expected)
    if value != expected:
        raise CheckpointError(
            f"config.json: {key} {value!r} is not implemented, only {expected!r}. "
            "Use another model, or add a family."
        )
