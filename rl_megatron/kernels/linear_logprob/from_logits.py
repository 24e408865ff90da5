"""Log-probs where logits are there anyway: of sampled tokens, a row each."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from rl_megatron.kernels.linear_logprob.choose import row_kernels
from rl_megatron.kernels.linear_logprob.merge import finish, merge


def logits_logprob(
    logits: Float[Tensor, "n V"], targets: Int[Tensor, " n"], implementation: str = "auto"
) -> Float[Tensor, " n"]:
    """Log-prob of each target, fp32 (fp64 for fp64 logits), by the arithmetic of the fused head.

    So a rollout's log-prob and the trainer's of the same hidden state are rounded alike, once.

    Args:
        logits: At the temperature; -inf on tokens that are out.
        targets: Token of each row, one that is not out.
        implementation: As in `linear_logprob`.
    """
    column = targets.long()
    ones = logits.new_ones(len(logits))
    kernels = row_kernels(implementation, logits.device, logits.dtype)
    statistics = kernels.statistics(logits, column, ones, None)
    return finish(merge(statistics[None])).logprob.to(logits.dtype)
