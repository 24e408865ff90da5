"""From hidden states and a vocabulary-sharded head to log-probs and entropy, without logits."""

from rl_megatron.kernels.linear_logprob.chunked import linear_logprob

__all__ = ["linear_logprob"]
