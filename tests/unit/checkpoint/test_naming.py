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
