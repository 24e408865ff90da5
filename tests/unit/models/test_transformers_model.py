"""Loading with transformers: what is not in the folder is an error, never a random weight."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rl_megatron.errors import CheckpointError
from rl_megatron.models import transformers_model
from rl_megatron.models.transformers_model import (
    as_we_run_it,
    load_transformers_model,
    named_weights,
    set_weights,
)
from tests.helpers.architectures import ARCHITECTURES, make_architecture, tiny_architecture
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


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_any_architecture_has_the_weights_of_its_file(model_type, tmp_path):
    folder = make_architecture(tmp_path, model_type)
    found = dict(named_weights(load_transformers_model(folder, torch.float32, CPU)))
    expected = load_file(folder / "model.safetensors")
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("model_type", ["mixtral", *ARCHITECTURES])
def test_what_is_set_is_what_transformers_reads_again(model_type, tmp_path):
    make = make_architecture if model_type in ARCHITECTURES else make_tiny_hf
    source, other = (
        make(tmp_path / "source", model_type),
        make(tmp_path / "other", model_type, seed=1),
    )
    model = load_transformers_model(other, torch.float32, CPU)
    set_weights(model, named_weights(load_transformers_model(source, torch.float32, CPU)))
    weights = {name: value.contiguous() for name, value in named_weights(model)}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    expected, found, again = (
        m(tokens).logits
        for m in (
            load_transformers_model(source, torch.float32, CPU),
            model,
            as_we_run_it(AutoModelForCausalLM.from_pretrained(other)),
        )
    )
    assert torch.equal(found, expected) and torch.equal(again, expected)


def test_names_are_those_of_the_architecture_whatever_the_file_calls_them(tmp_path):
    folder = make_architecture(tmp_path, "gpt2")
    expected = load_file(folder / "model.safetensors")
    # As the files of GPT-2 itself.
    bare = {name.removeprefix("transformer."): value for name, value in expected.items()}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    found = dict(named_weights(load_transformers_model(folder, torch.float32, CPU)))
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_that_are_computed_from_several_parameters_are_refused():
    def two_in_one(*_, **__):
        return {"both": torch.zeros(2)}

    model = tiny_architecture("gpt2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_model, "revert_weight_conversion", two_in_one)
        with pytest.raises(CheckpointError, match="model_type gpt2: transformers computes both in"):
            as_we_run_it(model)


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
    with pytest.raises(
        CheckpointError, match=r"holds model\.norm\.weight of shape \[5\], .* \[32\]"
    ):
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


@pytest.mark.parametrize(
    "model_type, said",
    [
        ("lamma", "cannot be read as a model's: .*model type `lamma`"),
        ("vit", "no causal language model of model_type 'vit'"),
        ("t5", "no causal language model of model_type 't5'"),
        ("gemma3", "more than a language model, .* as model_type 'gemma3_text'"),
    ],
)
def test_what_is_no_language_model_is_an_error(model_type, said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(CheckpointError, match=f"(?s){tmp_path}.*{said}"):
        load_transformers_model(tmp_path, torch.float32, CPU)


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


@pytest.mark.parametrize("model_type", ["gpt2", "phi", "gpt_neox", "gemma2"])
def test_any_architecture_becomes_a_reward_model(model_type, tmp_path):
    folder = make_architecture(tmp_path, model_type)
    expected = load_file(folder / "model.safetensors")
    head = torch.arange(32.0)[None]
    model = load_transformers_model(folder, torch.float32, CPU, head)
    found = dict(named_weights(model))
    assert torch.equal(found.pop("score.weight"), head)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    left = {name for name in expected if name not in found}
    assert not any(name.startswith(model.base_model_prefix + ".") for name in left)


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
