"""Families: numbers as transformers reads them, and tables that name every weight once."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rl_megatron.errors import CheckpointError
from rl_megatron.models.families import FAMILIES, read_shape, weight_rules
from rl_megatron.models.shape import ExpertShape

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
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
}
EXPERTS = {
    "qwen3_moe": ExpertShape(6, 3, intermediate_size=20, renormalise=False),
    "mixtral": ExpertShape(4, 2, intermediate_size=48, renormalise=True),
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
    assert (shape.qkv_bias, shape.qk_norm) == (name == "qwen2", name.startswith("qwen3"))
    assert shape.experts == EXPERTS.get(name)


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


def test_experts_left_out_are_those_that_transformers_takes():
    given = Qwen3MoeConfig().to_dict() | {"sliding_window": None}
    for key in ("num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob"):
        given.pop(key, None)
    shape = FAMILIES["qwen3_moe"].shape(given)
    assert shape.experts == ExpertShape(128, 8, intermediate_size=768, renormalise=False)
    # A width that follows from the heads, unlike in Qwen3.
    assert (shape.head_dim, shape.num_key_value_heads) == (2048 // 32, 4)

    given = MixtralConfig().to_dict()
    for key in ("num_local_experts", "num_experts_per_tok", "rms_norm_eps", "rope_parameters"):
        del given[key]
    shape = FAMILIES["mixtral"].shape(given)
    assert shape.experts == ExpertShape(8, 2, intermediate_size=14336, renormalise=True)
    assert (shape.norm_eps, shape.rope.theta, shape.num_key_value_heads) == (1e-5, 1e6, 8)


def test_either_name_for_the_number_of_experts():
    """Public files say num_experts, newer transformers num_local_experts."""
    given = {k: v for k, v in CONFIGS["qwen3_moe"].to_dict().items() if "_experts" not in k}
    for key in ("num_experts", "num_local_experts"):
        shape = FAMILIES["qwen3_moe"].shape(given | {key: 6, "num_experts_per_tok": 3})
        assert shape.experts == EXPERTS["qwen3_moe"]


def test_ck_05_experts_are_numbered_over_the_whole_layer():
    shape = FAMILIES["mixtral"].shape(CONFIGS["mixtral"].to_dict())
    rules = {rule.megatron_name: rule for rule in weight_rules(shape)}
    hf, megatron = "model.layers.1.block_sparse_moe.", "decoder.layers.1.mlp."
    for e in range(4):
        fc1, fc2 = (
            rules[f"{megatron}experts.local_experts.{e}.linear_fc{i}.weight"] for i in (1, 2)
        )
        assert fc1.hf_names == (f"{hf}experts.{e}.w1.weight", f"{hf}experts.{e}.w3.weight")
        assert fc2.hf_names == (f"{hf}experts.{e}.w2.weight",)
    assert rules[f"{megatron}router.weight"].hf_names == (f"{hf}gate.weight",)


@pytest.mark.parametrize("name", CONFIGS)
def test_table_names_every_weight_of_the_model_with_its_shape(name, tmp_path):
    shape = read(CONFIGS[name], tmp_path)
    if shape.experts is None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIGS[name])
        expected = {n: tuple(p.shape) for n, p in model.named_parameters()}
    else:  # The model keeps the experts of a layer in one tensor; files do not.
        AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        expected = {n: tuple(t.shape) for n, t in weights.items()}
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
        ("llama", {"model_type": "gpt2"}, ["gpt2", "llama, mistral, mixtral, qwen2, qwen3"]),
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
        ("qwen3_moe", {"mlp_only_layers": [0]}, ["mlp_only_layers [0]", "every layer"]),
        ("qwen3_moe", {"decoder_sparse_step": 2}, ["decoder_sparse_step 2"]),
        ("qwen3_moe", {"num_experts_per_tok": 9}, ["num_experts_per_tok (9)", "6 experts"]),
        ("mixtral", {"num_experts_per_tok": 1}, ["num_experts_per_tok 1", "router"]),
        ("mixtral", {"router_jitter_noise": 0.1}, ["router_jitter_noise 0.1"]),
        ("mixtral", {"sliding_window": 128}, ["sliding_window 128", "256"]),
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
