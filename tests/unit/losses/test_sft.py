import math

import pytest
import torch

from rl_megatron.losses.sft import sft_objective
from tests.helpers.packed import packed, random_masks, run_objective


def test_token_mean_by_hand():
    batch = packed([[0, 1], [0, 1, 1, 1]])
    logprobs = torch.tensor([-9, -4.0, -9, -1.0, -1.0, -1.0])
    entropy = torch.tensor([9, 1.0, 9, 2.0, 2.0, 3.0])
    outcome = run_objective(sft_objective(), batch, logprobs, entropy=entropy)
    assert outcome.loss == 1.75
    assert outcome.metrics == {"loss/nll": 1.75, "policy/entropy": 2.0}
    assert outcome.gradient.tolist() == [0.0, -0.25, 0.0, -0.25, -0.25, -0.25]


def test_same_numbers_however_the_mini_batch_is_split():
    masks = random_masks(1, 6, empty=(2,))
    batch = packed(masks)
    logprobs = -torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    whole = run_objective(sft_objective(), batch, logprobs, entropy=-logprobs)
    mean = -logprobs.double()[batch.response_mask].mean().item()
    assert whole.loss == pytest.approx(mean, rel=1e-7)
    for parts in ([[i] for i in range(6)], [[5, 2], [0, 1, 3, 4], []]):
        other = run_objective(sft_objective(), batch, logprobs, parts, entropy=-logprobs)
        assert other.loss == pytest.approx(whole.loss, rel=1e-12)
        assert other.metrics == pytest.approx(whole.metrics, rel=1e-12)
        assert torch.equal(other.gradient, whole.gradient)


def test_grpo_08_masked_garbage_and_nothing_valid():
    garbage = torch.tensor([math.nan, -0.5, -math.inf])
    outcome = run_objective(sft_objective(), packed([[0, 1, 0]]), garbage, entropy=garbage)
    assert outcome.loss == 0.5
    assert outcome.gradient.tolist() == [0.0, -1.0, 0.0]
    outcome = run_objective(sft_objective(), packed([[0, 0, 0]]), garbage, entropy=garbage)
    assert (outcome.loss, set(outcome.metrics.values())) == (0.0, {0.0})
    assert outcome.gradient.tolist() == [0.0] * 3
