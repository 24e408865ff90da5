"""A transformers model with its head: any architecture, nothing to compute, recomputed layers."""

import pytest
import torch

from rl_megatron.errors import ConfigError
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.models.transformers_policy import TransformersPolicy
from tests.helpers.architectures import ARCHITECTURES, tiny_architecture
from tests.helpers.backend_contract import CLOSE, make_batch
from tests.helpers.oracle import batch_logprobs

TEMPERATURE = 0.8
BATCH = make_batch()
NO_SEQUENCE = BATCH.select([])
NO_TOKEN = PackedBatch(
    torch.zeros(0, dtype=torch.int64),
    torch.tensor([0, 0]),
    torch.zeros(0, dtype=torch.bool),
    torch.arange(1),
)
NOT_ASKED = BATCH.with_fields(response_mask=torch.zeros_like(BATCH.response_mask))


def reward_model():
    from transformers import AutoModelForSequenceClassification, LlamaConfig

    config = LlamaConfig(
        vocab_size=131,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=1,
    )
    return AutoModelForSequenceClassification.from_config(config)


def gradients(policy, batch):
    """Of the sum of everything that the policy says, by name."""
    policy.zero_grad()
    sum(output.sum() for output in policy(batch)).backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_logprobs_are_those_of_the_models_own_logits(model_type):
    model = tiny_architecture(model_type)
    found, _ = TransformersPolicy(model, TEMPERATURE)(BATCH)
    expected = batch_logprobs(model, BATCH, TEMPERATURE)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert expected[BATCH.response_mask].std() > 0.25


@pytest.mark.parametrize("model_type", ["gemma2", "phi"])
def test_gradients_are_those_of_the_models_own_logits(model_type):
    policy = TransformersPolicy(tiny_architecture(model_type), TEMPERATURE)
    policy(BATCH)[0].sum().backward()
    found = [parameter.grad for parameter in policy.parameters()]
    policy.zero_grad()
    batch_logprobs(policy.model, BATCH, TEMPERATURE).sum().backward()
    for gradient, parameter in zip(found, policy.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("model_type", ["gpt2", "phi"])
def test_a_parameter_is_listed_once_and_borrowed_by_the_head(model_type):
    model = tiny_architecture(model_type)
    policy = TransformersPolicy(model)
    names = [f"model.{name}" for name, _ in model.named_parameters()]
    every = [name for name, _ in policy.named_parameters(remove_duplicate=False)]
    assert set(every) == {f"model.{n}" for n, _ in model.named_parameters(remove_duplicate=False)}
    assert [name for name, _ in policy.named_parameters()] == names
    assert policy.head.weight is model.get_output_embeddings().weight
    assert len(policy.head.borrowed) == (2 if model_type == "phi" else 1)
    assert list(policy.head.parameters()) == []


@pytest.mark.parametrize("make", [lambda: tiny_architecture("gpt2"), reward_model])
@pytest.mark.parametrize(
    "batch", [NO_SEQUENCE, NO_TOKEN, NOT_ASKED], ids=["no_sequence", "no_token", "not_asked"]
)
@pytest.mark.parametrize("packed", [False, True])
def test_nothing_to_compute_gives_every_parameter_a_zero_gradient(packed, batch, make):
    policy = TransformersPolicy(make())
    outputs = policy(batch, packed=packed)
    if len(outputs) == 2:
        assert [output.shape for output in outputs] == [batch.tokens.shape] * 2
        loss = sum(output.sum() for output in outputs)
    else:
        assert outputs[0].shape == batch.sequence_ids.shape
        loss = 0 * outputs[0].sum()
    loss.backward()
    assert all(
        p.grad is not None and torch.equal(p.grad, torch.zeros_like(p)) for p in policy.parameters()
    )


@pytest.mark.parametrize("model_type", ["gpt2", "phi", "gemma2"])
def test_recomputed_layers_give_the_same_gradients_without_dropout(model_type):
    policy = TransformersPolicy(tiny_architecture(model_type))
    calls = []
    policy.model.base_model.register_forward_hook(lambda *_: calls.append("model"))
    layer = next(m for m in policy.model.modules() if type(m).__name__.endswith("MLP"))
    layer.register_forward_pre_hook(lambda *_: calls.append("layer"))
    kept = gradients(policy, BATCH)
    assert calls == ["layer", "model"]
    calls.clear()
    policy.recompute_layers()
    recomputed = gradients(policy, BATCH)
    assert calls == ["layer", "model", "layer"]
    assert [name for name in kept if not torch.equal(kept[name], recomputed[name])] == []
    with torch.inference_mode():
        policy(BATCH)


def test_a_model_that_does_not_say_what_its_layers_are_is_not_recomputed():
    policy = TransformersPolicy(tiny_architecture("gpt2"))
    policy.model.base_model.h = torch.nn.ModuleList()
    with pytest.raises(ConfigError, match=r"model\.recompute = 'full': .*gpt2"):
        policy.recompute_layers()
