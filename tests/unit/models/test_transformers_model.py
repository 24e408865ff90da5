"""Loading with transformers: what is not in the folder is an error, never a random weight."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_megatron.errors import CheckpointError
from rl_megatron.models.transformers_model import (
    load_transformers_model,
    named_weights,
    set_weights,
)
from tests.helpers.tiny_model import make_tiny_hf

CPU = torch.device("cpu")


def rewrite(folder, change):
    """Change the weights file of a folder."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("tie", [False, True])
def test_weights_are_those_of_the_file_bit_by_bit(tie, family, tmp_path):
    folder = make_tiny_hf(tmp_path, family, tie=tie)
    found = dict(named_weights(load_transformers_model(folder, torch.float32, CPU)))
    expected = load_file(folder / "model.safetensors")
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert ("lm_head.weight" in found) != tie


def test_dtype_is_what_was_asked_for(tmp_path):
    model = load_transformers_model(make_tiny_hf(tmp_path), torch.bfloat16, CPU)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_missing_weight_is_an_error(tmp_path):
    folder = make_tiny_hf(tmp_path)
    rewrite(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load_transformers_model(folder, torch.float32, CPU)


def test_a_weight_that_the_model_has_no_place_for_is_an_error(tmp_path):
    folder = make_tiny_hf(tmp_path)
    rewrite(folder, lambda weights: weights.update({"model.extra.weight": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"holds model\.extra\.weight"):
        load_transformers_model(folder, torch.float32, CPU)


def test_a_weight_of_another_shape_is_an_error(tmp_path):
    folder = make_tiny_hf(tmp_path)
    rewrite(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(5)}))
    with pytest.raises(CheckpointError, match=str(folder)):
        load_transformers_model(folder, torch.float32, CPU)


def test_no_or_broken_files_are_errors(tmp_path):
    folder = make_tiny_hf(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_transformers_model(folder, torch.float32, CPU)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_transformers_model(folder, torch.float32, CPU)


def test_an_unknown_family_is_an_error(tmp_path):
    folder = make_tiny_hf(tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "gemma2"}))
    with pytest.raises(CheckpointError, match="gemma2"):
        load_transformers_model(folder, torch.float32, CPU)


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_set_weights_copies_and_keeps_the_parameters(family, tmp_path):
    model = load_transformers_model(make_tiny_hf(tmp_path, family), torch.float32, CPU)
    before = {name: value.data_ptr() for name, value in named_weights(model)}
    doubled = {name: 2 * value.double() for name, value in named_weights(model)}
    set_weights(model, doubled.items())
    for name, value in named_weights(model):
        assert torch.equal(value, doubled[name].float())
        assert value.data_ptr() == before[name]


def test_set_weights_says_which_expert_is_missing(tmp_path):
    model = load_transformers_model(make_tiny_hf(tmp_path, "mixtral"), torch.float32, CPU)
    weights = dict(named_weights(model))
    del weights["model.layers.1.block_sparse_moe.experts.5.w3.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.block_sparse_moe\.experts\.5\.w3"):
        set_weights(model, weights.items())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_reward_model_is_loaded_whole_or_with_a_given_head(family, tmp_path):
    folder = make_tiny_hf(tmp_path / "scorer", family, scalar_head=True)
    expected = load_file(folder / "model.safetensors")
    found = dict(named_weights(load_transformers_model(folder, torch.float32, CPU)))
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    language = make_tiny_hf(tmp_path / "language", family)
    head = torch.arange(32.0)[None]
    found = dict(named_weights(load_transformers_model(language, torch.float32, CPU, head)))
    expected = load_file(language / "model.safetensors")
    del expected["lm_head.weight"]
    expected["score.weight"] = head
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_reward_model_without_its_head_is_an_error(tmp_path):
    folder = make_tiny_hf(tmp_path, scalar_head=True)
    rewrite(folder, lambda weights: weights.pop("score.weight"))
    with pytest.raises(CheckpointError, match=r"lacks score\.weight"):
        load_transformers_model(folder, torch.float32, CPU)
