"""How per-token losses become one number: a weight per token, from the whole mini-batch.

The weights are made once, from all sequences of an optimiser step. After that a loss is a plain
sum of weight times per-token loss, and how the sequences are dealt to micro-batches and ranks
cannot change it.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_megatron.errors import ConfigError
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.objective import Totals
from rl_megatron.losses.sums import segment_sum

LOSS_AGG_MODES = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-sum",
)


def aggregation_weights(
    cu_seqlens: Int[Tensor, " N_plus_1"],
    response_mask: Bool[Tensor, " T"],
    loss_agg_mode: str,
    max_response_tokens: int | None = None,
) -> Float[Tensor, " T"]:
    """Weight of each token's loss, float32, 0 outside the mask.

    With m the mask, l the per-token loss and N the number of sequences that have a valid token:

    - token-mean: sum(l*m) / sum(m) (DAPO, arXiv 2503.14476, eq. 8)
    - seq-mean-token-mean: mean over N of each sequence's own token-mean (GRPO, arXiv 2402.03300)
    - seq-mean-token-sum: sum(l*m) / N
    - seq-mean-token-sum-norm: sum(l*m) / (N * max_response_tokens) (Dr.GRPO, arXiv 2503.20783)
    - token-sum: sum(l*m)

    A sequence without a valid token counts as nothing; without any valid token all weights are 0.

    Args:
        cu_seqlens: Boundaries of the sequences of the whole mini-batch.
        response_mask: Tokens that are trained on.
        loss_agg_mode: One of LOSS_AGG_MODES.
        max_response_tokens: The configured limit, never the longest response at hand; used by
            seq-mean-token-sum-norm only.

    Raises:
        ConfigError: The mode is unknown, or it needs max_response_tokens and there is none.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        known = ", ".join(LOSS_AGG_MODES)
        raise ConfigError(f"loss.loss_agg_mode: {loss_agg_mode!r} is unknown; use one of {known}")
    if loss_agg_mode == "seq-mean-token-sum-norm" and not max_response_tokens:
        raise ConfigError(
            f"rollout.max_response_tokens: {max_response_tokens} cannot be the divisor of "
            f"loss.loss_agg_mode {loss_agg_mode!r}; give a positive number or use another mode"
        )
    num_valid = segment_sum(response_mask, cu_seqlens)
    num_sequences = (num_valid > 0).sum()
    divisors = {
        "token-mean": num_valid.sum().expand_as(num_valid),
        "seq-mean-token-mean": num_sequences * num_valid,
        "seq-mean-token-sum": num_sequences.expand_as(num_valid),
        "seq-mean-token-sum-norm": num_sequences
        * torch.full_like(num_valid, max_response_tokens or 1),
        "token-sum": torch.ones_like(num_valid),
    }
    per_sequence = torch.where(num_valid > 0, 1.0 / divisors[loss_agg_mode], 0.0)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return torch.where(response_mask, torch.repeat_interleave(per_sequence, lengths), 0.0).float()


def valid_pairs(
    cu_seqlens: Int[Tensor, " N_plus_1"], response_mask: Bool[Tensor, " T"]
) -> Bool[Tensor, " P"]:
    """True for each pair (sequences 2i and 2i + 1) of which both sides have a valid token."""
    has_token = segment_sum(response_mask, cu_seqlens) > 0
    return has_token[0::2] & has_token[1::2]


def weigh_pairs(batch: PackedBatch) -> PackedBatch:
    """Each sequence of a valid pair weighs the same; a loss reads only which tokens count.

    What weighs is the pair: 1 / totals.num_pairs if it is valid.
    """
    valid = valid_pairs(batch.cu_seqlens, batch.response_mask).repeat_interleave(2)
    counted = batch.response_mask & valid.repeat_interleave(batch.lengths)
    weights = aggregation_weights(batch.cu_seqlens, counted, "seq-mean-token-mean")
    return batch.with_fields(loss_weights=weights)


def totals(batch: PackedBatch) -> Totals:
    """Counts over the whole mini-batch: the denominators of its metrics."""
    num_valid = segment_sum(batch.response_mask, batch.cu_seqlens)
    pairs = valid_pairs(batch.cu_seqlens, batch.response_mask) if batch.paired else None
    desirable = None if batch.desirable is None else batch.desirable & (num_valid > 0)
    return Totals(
        num_tokens=int(batch.response_mask.sum()),
        num_sequences=int((num_valid > 0).sum()),
        num_pairs=0 if pairs is None else int(pairs.sum()),
        num_desirable=0 if desirable is None else int(desirable.sum()),
    )
