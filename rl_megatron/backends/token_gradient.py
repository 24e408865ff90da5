"""What the head asks while it still holds the logits of a few rows: the gradient of the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.objective import ModelOutput, Objective, Totals
from rl_megatron.kernels.linear_logprob import TokenGradient


def token_gradient(
    objective: Objective,
    batch: PackedBatch,
    counts: Totals,
    predicted: Tensor,
    factor: float = 1.0,
) -> TokenGradient:
    """Gradient of the loss with respect to log-prob and entropy, for any rows of a micro-batch.

    Args:
        objective: One whose loss is token-local.
        batch: The micro-batch.
        counts: Of the whole mini-batch.
        predicted: Token of the batch that each row predicts.
        factor: The loss is multiplied by it before its backward pass.

    Returns:
        A function of rows [n], their log-probs [n] and entropies [n]; two gradients [n].
    """
    assert objective.token_local, f"the loss of {objective.name} looks at whole sequences"

    def gradient(rows: Tensor, logprob: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
        part = batch.at_tokens(predicted[rows])
        with torch.enable_grad():
            output = ModelOutput(logprob.detach(), entropy.detach())
            outputs = (output.logprobs.requires_grad_(), output.entropy.requires_grad_())
            loss = factor * objective.loss(output, part, counts).loss
            found = torch.autograd.grad(loss, outputs, materialize_grads=True)
        return found[0], found[1]

    return gradient
