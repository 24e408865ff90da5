"""A model without weights: nothing held while they are away, and buffers as in a loaded one."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_megatron.models.transformers_bare import (
    bare_transformers_model,
    give_memory_back,
    take_memory,
)
from rl_megatron.models.transformers_model import (
    as_we_run_it,
    load_transformers_model,
    named_weights,
    set_weights,
)
from tests.helpers.architectures import ARCHITECTURES, make_architecture
from tests.helpers.tiny_model import LLAMA3_ROPE, make_tiny_hf

CPU = torch.device("cpu")


def bytes_held(model):
    return sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "mixtral", *ARCHITECTURES])
def test_it_is_the_loaded_model_but_for_the_weights(model_type, dtype, tmp_path):
    if model_type in ARCHITECTURES:
        folder = make_architecture(tmp_path, model_type)
    else:
        folder = make_tiny_hf(tmp_path, model_type, rope=LLAMA3_ROPE, tie=True)
    # Loaded by transformers, so that any architecture will do.
    expected = as_we_run_it(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())
    model = bare_transformers_model(folder, dtype, CPU)
    assert not model.training
    shapes = [(name, p.shape, p.dtype) for name, p in model.named_parameters()]
    assert shapes == [(name, p.shape, p.dtype) for name, p in expected.named_parameters()]
    found = dict(model.named_buffers())
    assert list(found) == [name for name, _ in expected.named_buffers()]
    saved = expected.state_dict().keys()
    for name, buffer in expected.named_buffers():
        assert found[name].dtype == buffer.dtype
        assert name in saved or torch.equal(found[name], buffer), name

    take_memory(model)
    set_weights(model, named_weights(expected))
    with torch.no_grad():
        tokens = torch.tensor([[5, 6, 7, 8]])
        assert torch.equal(model(tokens).logits, expected(tokens).logits)


def test_it_holds_no_memory_for_weights_before_and_after(tmp_path):
    folder = make_tiny_hf(tmp_path)
    model = bare_transformers_model(folder, torch.bfloat16, CPU)
    assert bytes_held(model) == 0
    take_memory(model)
    assert bytes_held(model) == 2 * sum(parameter.numel() for parameter in model.parameters())
    give_memory_back(model)
    assert bytes_held(model) == 0


def test_no_weight_is_read_or_drawn(tmp_path):
    folder = make_tiny_hf(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    bare_transformers_model(folder, torch.float32, CPU)
    assert torch.equal(torch.rand(1), expected)


def test_other_models_are_made_as_ever_afterwards(tmp_path):
    folder = make_tiny_hf(tmp_path)
    bare_transformers_model(folder, torch.float32, CPU)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert not any(parameter.is_meta for parameter in model.parameters())
    load_transformers_model(folder, torch.float32, CPU)
