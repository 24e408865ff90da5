"""Packed sequences in a transformers model: each as if it were alone."""

from dataclasses import replace

import pytest
import torch

from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.models import span_attention
from rl_megatron.models.transformers_model import as_we_run_it
from rl_megatron.models.transformers_policy import TransformersPolicy
from tests.helpers.architectures import ARCHITECTURES, tiny_architecture
from tests.helpers.backend_contract import make_batch
from tests.helpers.tiny_model import make_tiny_hf

FAMILIES = ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"]
# Sequences longer than windows and chunks (5 and 6), one of one token, one of none.
LENGTHS = [13, 1, 0, 5, 22, 6]


def batch_of(lengths):
    generator = torch.Generator().manual_seed(1)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    asked = torch.ones(sum(lengths), dtype=torch.bool)
    asked[bounds[:-1][bounds.diff() > 0]] = False
    tokens = torch.randint(3, 131, (sum(lengths),), generator=generator)
    return PackedBatch(tokens, bounds, asked, torch.arange(len(lengths)))


BATCH = batch_of(LENGTHS)


def policy_of(model_type, tmp_path, **settings):
    if model_type in FAMILIES:
        from transformers import AutoModelForCausalLM

        settings |= {"sliding_window": 6} if model_type in ("mistral", "mixtral") else {}
        folder = make_tiny_hf(tmp_path, model_type, **settings)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        model = tiny_architecture(model_type, **settings)
    return TransformersPolicy(as_we_run_it(model))


def alone(policy, batch):
    parts = [policy(batch.select([i])) for i in range(batch.num_sequences)]
    return [torch.cat(values) for values in zip(*parts, strict=True)]


@pytest.mark.parametrize("model_type", [*FAMILIES, *ARCHITECTURES, "gpt_oss", "llama4_text", "opt"])
@torch.no_grad()
def test_each_sequence_is_as_if_alone(model_type, tmp_path):
    policy = policy_of(model_type, tmp_path)
    found, expected = policy(BATCH, packed=True), alone(policy, BATCH)
    for now, then in zip(found, expected, strict=True):
        # An expert, or a call of attention, has the tokens of several sequences.
        torch.testing.assert_close(now, then, atol=3e-6, rtol=3e-6)
    assert found[0][BATCH.response_mask].std() > 0.25


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", "gemma3_text", "phi"])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_the_sequences_alone(recompute, model_type, tmp_path):
    policy = policy_of(model_type, tmp_path)
    sum(value.sum() for value in alone(policy, BATCH)).backward()
    expected = [p.grad for p in policy.parameters()]
    policy.zero_grad()
    if recompute:
        policy.recompute_layers()
    sum(value.sum() for value in policy(BATCH, packed=True)).backward()
    for parameter, gradient in zip(policy.parameters(), expected, strict=True):
        scale = float(gradient.abs().max())
        torch.testing.assert_close(parameter.grad, gradient, atol=2e-6 * scale, rtol=2e-5)


@pytest.mark.parametrize("model_type", [*FAMILIES, "gemma2", "gemma3_text", "gpt2", "phi"])
@torch.no_grad()
def test_no_bit_of_a_sequence_depends_on_the_tokens_of_another(model_type, tmp_path):
    policy = policy_of(model_type, tmp_path)
    other = torch.where(BATCH.segment_ids == 4, BATCH.tokens, 130 - BATCH.tokens % 120)
    changed = policy(replace(BATCH, tokens=other), packed=True)
    kept = BATCH.segment_ids == 4
    for now, then in zip(changed, policy(BATCH, packed=True), strict=True):
        assert not torch.equal(now[~kept], then[~kept])
        if model_type not in ("mixtral", "qwen3_moe"):  # Their experts get other tokens as well.
            assert torch.equal(now[kept], then[kept])


def test_attention_is_computed_within_sequences_only(tmp_path, monkeypatch):
    policy = policy_of("llama", tmp_path)
    kernel, seen = span_attention.scaled_dot_product_attention, []

    def spy(query, key, value, attn_mask=None, **more):
        assert query.shape[2] == key.shape[2] and attn_mask is None and more["is_causal"]
        seen.append((query.shape[0], query.shape[2]))
        return kernel(query, key, value, attn_mask=attn_mask, **more)

    monkeypatch.setattr(span_attention, "scaled_dot_product_attention", spy)
    policy(BATCH, packed=True)
    assert max(size for _, size in seen) == max(LENGTHS)
    # Sequences of similar length share a call, and are padded a little.
    assert sum(number * size for number, size in seen) <= 2 * (sum(LENGTHS) + 16)


@torch.no_grad()
def test_a_packed_batch_leaves_nothing_behind(tmp_path):
    policy = policy_of("gemma3_text", tmp_path)
    expected = policy(BATCH)
    policy(BATCH, packed=True)
    assert all(map(torch.equal, policy(BATCH), expected))


@torch.no_grad()
def test_scores_of_packed_sequences():
    from transformers import AutoModelForSequenceClassification, Qwen2Config

    config = Qwen2Config(
        vocab_size=131,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_labels=1,
    )
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    policy = TransformersPolicy(as_we_run_it(model))
    batch = make_batch()
    # The head multiplies the rows of all sequences at once.
    torch.testing.assert_close(
        policy(batch, packed=True)[0], alone(policy, batch)[0], atol=1e-6, rtol=1e-6
    )
