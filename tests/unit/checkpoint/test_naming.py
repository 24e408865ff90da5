"""Layers by their number in the whole model, wherever a stage or a virtual stage begins."""

import pytest
import torch
from torch import nn

from rl_megatron.checkpoint.naming import global_parameters
from rl_megatron.models.families import FAMILIES, weight_rules
from tests.helpers.bare_model import BareChunk

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "vocab_size": 10,
    "max_position_embeddings": 16,
}
RULES = weight_rules(FAMILIES["llama"].shape(CONFIG), 16)


def layers_of(names):
    return sorted({int(name.split(".")[2]) for name in names if ".layers." in name})


@pytest.mark.parametrize(
    ("chunks", "layers"),
    [([[0, 1], [4, 5]], [0, 1, 4, 5]), ([[2, 3], [6, 7]], [2, 3, 6, 7]), ([[5, 6, 7]], [5, 6, 7])],
)
def test_ck_10_local_layers_are_named_by_their_global_number(chunks, layers):
    in_layers = [rule for rule in RULES if ".layers." in rule.megatron_name]
    modules = [BareChunk(in_layers, chunk) for chunk in chunks]
    found = global_parameters(modules)
    assert layers_of(found) == layers
    assert set(found) == {
        rule.megatron_name for rule in in_layers if layers_of([rule.megatron_name])[0] in layers
    }
    last = modules[-1].decoder.layers[-1].mlp.linear_fc2.weight
    assert found[f"decoder.layers.{layers[-1]}.mlp.linear_fc2.weight"] is last


def test_wrappers_and_norms_fused_by_transformer_engine_change_no_name():
    chunk = BareChunk(RULES, range(8))
    expected = set(global_parameters([chunk]))
    for layer in chunk.decoder.layers:
        del layer.input_layernorm, layer.pre_mlp_layernorm
        for linear in (layer.self_attention.linear_qkv, layer.mlp.linear_fc1):
            linear.layer_norm_weight = nn.Parameter(torch.ones(8))
    wrapper = nn.Module()
    wrapper.module = chunk
    assert set(global_parameters([wrapper])) == expected


def expert_chunk(numbers):
    """A layer (the fourth) with two local experts."""
    config = CONFIG | {"model_type": "mixtral", "num_local_experts": 2, "num_hidden_layers": 4}
    config["num_key_value_heads"] = 4
    rules = weight_rules(FAMILIES["mixtral"].shape(config), 16)
    chunk = BareChunk([rule for rule in rules if ".layers.3." in rule.megatron_name], [3])
    chunk.decoder.layers[0].mlp.local_expert_indices = numbers
    return chunk


def expert_numbers(names):
    return sorted(int(name.split(".")[6]) for name in names if "linear_fc1" in name)


def test_ck_05_local_experts_are_named_by_their_global_number():
    found = global_parameters([expert_chunk([4, 5])])
    assert expert_numbers(found) == [4, 5]
    assert "decoder.layers.3.mlp.router.weight" in found


def test_experts_grouped_by_transformer_engine_have_the_same_names():
    chunk = expert_chunk([4, 5])
    expected = global_parameters([chunk])
    experts = chunk.decoder.layers[0].mlp.experts
    for linear in ("linear_fc1", "linear_fc2"):
        grouped = nn.Module()
        for e, expert in enumerate(experts.local_experts.children()):
            grouped.register_parameter(f"weight{e}", getattr(expert, linear).weight)
        experts.add_module(linear, grouped)
    del experts.local_experts
    found = global_parameters([chunk])
    assert found.keys() == expected.keys()
    assert all(found[name] is expected[name] for name in found)
