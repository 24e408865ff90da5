"""Families: numbers as transformers reads them, and tables that name every weight once."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from rl_megatron.errors import CheckpointError
from rl_megatron.models.families import FAMILIES, read_shape, weight_rules

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-head-dim": LlamaConfig(**SIZES, head_dim=16),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}


def read(config, folder):
    config.save_pretrained(folder)
    return read_shape(folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_are_those_of_transformers(name, tmp_path):
    config = CONFIGS[name]
    shape = read(config, tmp_path)
    assert shape.family == name.split("-")[0]
    assert (shape.num_layers, shape.hidden_size, shape.intermediate_size) == (2, 32, 48)
    assert (shape.num_attention_heads, shape.num_key_value_heads) == (4, 2)
    assert shape.head_dim == (getattr(config, "head_dim", None) or 8)
    assert (shape.vocab_size, shape.norm_eps) == (100, 1e-5)
    assert shape.tie_word_embeddings == config.tie_word_embeddings
    assert shape.max_position_embeddings == 256
    assert shape.rope.theta == config.rope_parameters["rope_theta"]
    assert (shape.qkv_bias, shape.qk_norm) == (name == "qwen2", name == "qwen3")


@pytest.mark.parametrize(
    ("config", "head_dim", "groups"),
    [(LlamaConfig(), 128, 32), (MistralConfig(), 128, 8), (Qwen2Config(), 128, 32)]
    + [(Qwen3Config(), 128, 32)],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_what_a_config_leaves_out_is_what_transformers_takes(config, head_dim, groups):
    """The keys whose absence means something else than null."""
    given = config.to_dict()
    given["max_position_embeddings"], given["sliding_window"] = 64, None
    for key in ("head_dim", "num_key_value_heads", "rope_parameters", "tie_word_embeddings"):
        given.pop(key, None)
    shape = FAMILIES[config.model_type].shape(given)
    assert (shape.head_dim, shape.num_key_value_heads) == (head_dim, groups)
    assert (shape.rope.theta, shape.tie_word_embeddings) == (10000.0, False)


@pytest.mark.parametrize("name", CONFIGS)
def test_table_names_every_weight_of_the_model_with_its_shape(name, tmp_path):
    shape = read(CONFIGS[name], tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    expected = {n: tuple(p.shape) for n, p in model.named_parameters()}
    rules = [rule for rule in weight_rules(shape) if not rule.is_copy]
    named = [
        pair for rule in rules for pair in zip(rule.hf_names, rule.split.hf_shapes, strict=True)
    ]
    assert len(named) == len(dict(named))
    assert dict(named) == expected
    assert len({rule.megatron_name for rule in rules}) == len(rules)


def test_a_tied_head_is_a_copy_of_the_embedding():
    shape = FAMILIES["qwen2"].shape(CONFIGS["qwen2"].to_dict())
    (copy,) = [rule for rule in weight_rules(shape) if rule.is_copy]
    assert copy.megatron_name == "output_layer.weight"
    assert copy.hf_names == ("model.embed_tokens.weight",)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("llama", {"model_type": "gpt2"}, ["gpt2", "llama, mistral, qwen2, qwen3"]),
        ("llama", {"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ("llama", {"attention_bias": True}, ["attention_bias"]),
        ("llama", {"mlp_bias": True}, ["mlp_bias"]),
        ("llama", {"num_key_value_heads": 3}, ["num_key_value_heads (3)", "4"]),
        ("llama", {"vocab_size": None}, ["vocab_size", "None"]),
        ("llama", {"num_hidden_layers": "2"}, ["num_hidden_layers", "'2'"]),
        ("mistral", {"sliding_window": 128}, ["sliding_window 128", "256"]),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "layer_types": None}
            | {"max_window_layers": 1},
            ["sliding_window 64"],
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 64}
            | {"layer_types": ["full_attention", "sliding_attention"]},
            ["sliding_window 64"],
        ),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ["yarn"]),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(name, change, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name].to_dict() | change))
    with pytest.raises(CheckpointError) as error:
        read_shape(tmp_path)
    for word in [str(tmp_path), *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral", {"sliding_window": 256}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "layer_types": None}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64}),
    ],
)
def test_a_window_that_never_acts_is_accepted(name, change):
    FAMILIES[name].shape(CONFIGS[name].to_dict() | change)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_is_named(text, tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_shape(tmp_path)
