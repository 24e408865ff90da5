"""The objectives give a kernel what it needs, and return what it says, under the same names."""

import pytest
import torch

from rl_megatron.kernels.launch import recorded
from rl_megatron.losses import dpo_objective, grpo_objective
from tests.helpers.packed import packed, random_masks, run_objective

SETTINGS = {
    "grpo": {},
    "grpo, no dual clip": {"clip_ratio_c": None, "clip_ratio_low": 0.1, "clip_ratio_high": 0.3},
    "grpo, KL and entropy": {"use_kl_loss": True, "kl_loss_coef": 0.2, "entropy_coef": 0.05},
    "gspo": {"loss_mode": "gspo", "use_kl_loss": True, "kl_loss_type": "k2", "kl_loss_coef": 0.2},
    "cispo": {"loss_mode": "cispo"},
}
PREFERENCES = {
    "sigmoid": {"label_smoothing": 0.1, "rpo_alpha": 0.3, "beta": 0.3},
    "ipo": {"loss_type": "ipo"},
    "orpo": {"loss_type": "orpo"},
    "simpo": {"loss_type": "simpo", "simpo_gamma": 0.2, "beta": 2.0},
}


def batch_of(masks, paired):
    values = torch.randn(5, sum(map(len, masks)), generator=torch.Generator().manual_seed(1))
    fields = {"ref_logprobs": values[2] - 3}
    if not paired:
        fields |= {"advantages": values[0], "old_logprobs": values[1] - 3}
    logprobs = (values[1] - 3 + 0.3 * values[3]).clamp(max=-0.1)
    return packed(masks, paired=paired, **fields), logprobs, values[4].abs()


def assert_one_is_the_other(make, settings, paired, launches):
    batch, logprobs, entropy = batch_of(random_masks(3, 8, empty=[2]), paired)
    split = [[0, 1, 2, 3], [4, 5], [6, 7]]
    plain = run_objective(make(**settings, implementation="auto"), batch, logprobs, split, entropy)
    with recorded() as started:
        kernel = run_objective(
            make(**settings, implementation="triton"), batch, logprobs, split, entropy
        )
    assert len(started) == launches * len(split)
    assert kernel.loss == pytest.approx(plain.loss, rel=1e-12)
    assert kernel.metrics == pytest.approx(plain.metrics, rel=1e-12, abs=1e-15)
    torch.testing.assert_close(kernel.gradient, plain.gradient, rtol=2e-7, atol=0)
    if plain.entropy_gradient is not None:
        assert torch.equal(kernel.entropy_gradient, plain.entropy_gradient)


@pytest.mark.parametrize("name", SETTINGS)
def test_policy_objective(name):
    def make(**settings):
        return grpo_objective(
            max_response_tokens=8, loss_agg_mode="seq-mean-token-mean", **settings
        )

    assert_one_is_the_other(make, SETTINGS[name], paired=False, launches=2)


@pytest.mark.parametrize("name", PREFERENCES)
def test_preference_objective(name):
    assert_one_is_the_other(dpo_objective, PREFERENCES[name], paired=True, launches=3)
