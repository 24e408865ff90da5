"""Rotary settings: both layouts of config.json, and the frequencies of transformers bit by bit."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rl_megatron.errors import CheckpointError
from rl_megatron.models.rope import inverse_frequencies, parse_rope
from rl_megatron.models.shape import RopeSettings

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def both_layouts(theta, scaling):
    old_scaling = {("type" if k == "rope_type" else k): v for k, v in scaling.items()} or None
    return [
        {"rope_theta": theta, "rope_scaling": scaling or None},
        {"rope_theta": theta, "rope_scaling": old_scaling},
        {"rope_parameters": {"rope_type": "default", **scaling, "rope_theta": theta}},
    ]


@pytest.mark.parametrize("config", both_layouts(10000.0, LINEAR))
def test_ck_04_linear_scaling_angles(config):
    rope = parse_rope(config)
    assert rope == RopeSettings(10000.0, "linear", factor=8.0)
    angles = 16 * inverse_frequencies(rope, head_dim=4)
    assert torch.allclose(angles, torch.tensor([2.0, 0.02]), rtol=1e-6)


@pytest.mark.parametrize("config", both_layouts(500000.0, LLAMA3))
def test_ck_04_llama3_keeps_all_five_numbers(config):
    assert parse_rope(config) == RopeSettings(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("config", both_layouts(1e6, {}))
def test_ck_04_theta_without_scaling(config):
    assert parse_rope(config) == RopeSettings(1e6)


@pytest.mark.parametrize("kind", ["foo", "dynamic", "yarn", "longrope"])
def test_ck_04_other_rope_types_are_refused(kind):
    for config in both_layouts(10000.0, {"rope_type": kind, "factor": 2.0}):
        with pytest.raises(CheckpointError, match=kind):
            parse_rope(config)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor"),
        ({"rope_scaling": LINEAR, "rope_parameters": LLAMA3}, "disagree"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(config, word):
    with pytest.raises(CheckpointError, match=word):
        parse_rope(config)


def test_nothing_given_means_theta_10000():
    assert parse_rope({}) == RopeSettings(10000.0)


@pytest.mark.parametrize("scaling", [{}, LINEAR, LLAMA3], ids=["none", "linear", "llama3"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_are_those_of_transformers(scaling, head_dim):
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=65536,
        rope_parameters={"rope_type": "default", **scaling, "rope_theta": 500000.0},
    )
    rope = parse_rope(config.to_dict())
    assert rope.scaling == (scaling.get("rope_type", "none"))
    assert inverse_frequencies(rope, head_dim).equal(LlamaRotaryEmbedding(config).inv_freq)
