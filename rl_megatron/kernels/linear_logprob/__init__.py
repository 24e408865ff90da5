"""From hidden states and a vocabulary-sharded head to log-probs and entropy, without logits."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_megatron.errors import ConfigError
from rl_megatron.kernels.linear_logprob.choose import SETTING, describe, row_kernels
from rl_megatron.kernels.linear_logprob.from_logits import logits_logprob
from rl_megatron.kernels.linear_logprob.one_pass import TokenGradient
from rl_megatron.kernels.linear_logprob.op import Call, apply
from rl_megatron.kernels.linear_logprob.reference import plain_logprob
from rl_megatron.kernels.linear_logprob.sharing import Sharing

__all__ = ["TokenGradient", "describe", "linear_logprob", "logits_logprob"]


def linear_logprob(
    hidden: Float[Tensor, "T_local H"],
    weight: Float[Tensor, "V_local H"],
    targets: Int[Tensor, " T"],
    temperature: float | Float[Tensor, " T"],
    vocab_size: int,
    tensor_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    *,
    softcap: float | None = None,
    implementation: str = "auto",
    token_gradient: TokenGradient | None = None,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Log-prob of each target and entropy of the distribution it is drawn from, in nats.

    Targets, temperatures and the gradients that arrive must be the same on all ranks of the group.

    Args:
        hidden: Output of the last layer. With sequence parallelism rank r of the group holds rows
            [r * T_local, (r + 1) * T_local).
        weight: This rank's rows of the head; rank r of the group holds the r-th shard. Megatron's
            float32 `main_grad` of a parameter is added to directly.
        targets: Token that each row predicts; -1 skips a row (log-prob and entropy 0, no gradient).
        temperature: Logits are divided by it, one for all or one per row; > 0.
        vocab_size: Rows of the head that are real; those behind are padding and take no part.
        tensor_group: Ranks that share the vocabulary; None for one.
        sequence_parallel: Rows of `hidden` are split over the tensor group.
        softcap: Logits x become softcap * tanh(x / softcap) before they are divided.
        implementation: `auto`, or the name of one; see `choose`.
        token_gradient: For a loss that is a sum over tokens: its gradients, told from log-prob and
            entropy. Saves a quarter of the work where they are what arrives; no result changes.

    Returns:
        Two [T], fp32 (fp64 for fp64 input), equal on all ranks of the group to the last bit.

    Raises:
        DataError: A target is no token of the vocabulary (on a GPU an assertion of the device).
        ConfigError: The implementation cannot be had here.
    """
    sharing = Sharing.of(tensor_group, sequence_parallel)
    if implementation == "reference":
        if sharing.size > 1:
            raise ConfigError(
                f"{SETTING}: reference has all logits on one rank, and {sharing.size} share the "
                "vocabulary. Use torch."
            )
        return plain_logprob(hidden, weight, targets, temperature, vocab_size, softcap)
    learning = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    call = Call(
        targets=targets,
        temperature=temperature,
        vocab_size=vocab_size,
        sharing=sharing,
        softcap=softcap,
        kernels=row_kernels(implementation, hidden.device, hidden.dtype),
        token_gradient=token_gradient if learning else None,
    )
    return apply(hidden, weight, call)
