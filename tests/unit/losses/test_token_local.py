"""A token-local loss gives each token the gradient it has among all others, to the last bit."""

import pytest
import torch

from rl_megatron.interfaces.objective import ModelOutput
from rl_megatron.losses import dpo_objective, grpo_objective, sft_objective, totals
from tests.helpers.packed import packed, random_masks, run_objective

GRPO = {"max_response_tokens": 8, "loss_agg_mode": "seq-mean-token-mean"}
TOKEN_LOCAL = {
    "sft": sft_objective(),
    "grpo": grpo_objective(**GRPO),
    "grpo, k2 and entropy": grpo_objective(
        **GRPO, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2", entropy_coef=0.01
    ),
    "grpo, k3": grpo_objective(**GRPO, use_kl_loss=True, kl_loss_coef=0.1),
    "cispo": grpo_objective(**GRPO, loss_mode="cispo"),
}


def problem():
    masks = random_masks(3, 7, empty=[2])
    num_tokens = sum(map(len, masks))
    values = torch.randn(5, num_tokens, generator=torch.Generator().manual_seed(1))
    batch = packed(
        masks,
        advantages=values[0],
        old_logprobs=values[1] - 3,
        ref_logprobs=values[2] - 3,
    )
    return batch, values[1] - 3 + 0.3 * values[3], values[4].abs()


@pytest.mark.parametrize("name", TOKEN_LOCAL)
def test_a_token_alone_has_the_gradient_it_has_among_others(name):
    objective = TOKEN_LOCAL[name]
    batch, logprobs, entropy = problem()
    whole = run_objective(objective, batch, logprobs, entropy=entropy)
    assert objective.token_local and whole.gradient.any()
    weighed, counts = objective.weigh(batch), totals(batch)
    order = torch.randperm(batch.num_tokens, generator=torch.Generator().manual_seed(2))
    for index in order.split(5):
        leaves = (logprobs[index].requires_grad_(), entropy[index].requires_grad_())
        part = weighed.at_tokens(index)
        assert part.num_sequences == 1 and torch.equal(part.advantages, batch.advantages[index])
        loss = objective.loss(ModelOutput(*leaves), part, counts).loss
        found = torch.autograd.grad(loss, leaves, materialize_grads=True)
        assert torch.equal(found[0], whole.gradient[index])
        if whole.entropy_gradient is not None:
            assert torch.equal(found[1], whole.entropy_gradient[index])


@pytest.mark.parametrize(
    "objective", [dpo_objective(), grpo_objective(max_response_tokens=8, loss_mode="gspo")]
)
def test_losses_of_whole_sequences_say_so(objective):
    assert not objective.token_local
