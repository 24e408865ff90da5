"""Direct preference optimisation and its relatives: the objective of a batch of pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from rl_megatron.config.loss import LENGTH_AVERAGED, REFERENCE_FREE, PairLossType
from rl_megatron.interfaces import metric_names as names
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.objective import LossOutput, ModelOutput, Objective, Totals
from rl_megatron.kernels.choose import loss_kernel_on
from rl_megatron.losses.aggregate import valid_pairs, weigh_pairs
from rl_megatron.losses.preference import implicit_rewards, pair_loss
from rl_megatron.losses.sums import counted_tokens, counted_values, segment_sum, zero_outside

if TYPE_CHECKING:
    from rl_megatron.kernels.preference_loss import PreferenceLossSettings


def dpo_objective(
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    simpo_gamma: float = 0.5,
    rpo_alpha: float | None = None,
    implementation: str = "auto",
) -> Objective:
    """The objective loss/dpo + rpo_alpha * loss/nll, a mean over the valid pairs.

    The score of a response is the sum of its log-probs, or for some loss types their mean over
    tokens, less the same under the reference, if there is one; its implicit reward is beta times
    that. loss/dpo is a function of the two rewards of a pair, see `pair_loss`. A pair of which one
    side has no valid token counts neither above nor below the line. The metrics are per pair, under
    TRL's names; as there, `rewards/accuracies` counts margins above 0 only, so it is 0 before the
    first step. logps/ are sums, or means where the loss type averages.

    `rpo_alpha` weighs the negative log-likelihood of the chosen response: its mean over that
    response's own tokens, then over pairs (arXiv 2404.19733, eq. 2). TRL takes one mean over the
    chosen tokens of all pairs of a micro-batch instead; the two agree where lengths are equal.
    orpo is beta * loss/dpo + loss/nll (arXiv 2403.07691, eq. 6).

    `implementation` is `kernels.losses`: on a GPU a kernel of the same numbers.

    Raises:
        ConfigError: The loss type is unknown.
    """
    formula = pair_loss(loss_type, beta, label_smoothing, simpo_gamma)
    weight, nll_weight = (beta, 1.0) if loss_type == "orpo" else (1.0, rpo_alpha)

    def loss(output: ModelOutput, batch: PackedBatch, totals: Totals) -> LossOutput:
        assert batch.paired, "DPO needs pairs: chosen, rejected, chosen, rejected, ..."
        if loss_kernel_on(output.logprobs.device, implementation):
            from rl_megatron.kernels.preference_loss import PreferenceLossSettings

            settings = PreferenceLossSettings(
                beta, cast(PairLossType, loss_type), label_smoothing, simpo_gamma, rpo_alpha
            )
            return _by_kernel(settings, output, batch, totals)
        counted = counted_tokens(batch)
        num_tokens = segment_sum(counted, batch.cu_seqlens).clamp(min=1)
        divisor = num_tokens if loss_type in LENGTH_AVERAGED else 1
        sums = segment_sum(zero_outside(counted, output.logprobs), batch.cu_seqlens)
        logps = sums / divisor
        ref_logps = torch.zeros_like(logps)
        if loss_type not in REFERENCE_FREE:
            ref_logprobs = counted_values(batch, "ref_logprobs")
            ref_logps = segment_sum(ref_logprobs, batch.cu_seqlens) / divisor
        rewards = implicit_rewards(logps, ref_logps, beta)
        per_pair = {
            names.LOSS_DPO: formula(rewards),
            names.REWARDS_CHOSEN: rewards.chosen,
            names.REWARDS_REJECTED: rewards.rejected,
            names.REWARDS_MARGINS: rewards.margins,
            names.REWARDS_ACCURACIES: (rewards.margins > 0).double(),
            names.LOGPS_CHOSEN: logps[0::2],
            names.LOGPS_REJECTED: logps[1::2],
        }
        if nll_weight is not None:
            per_pair[names.LOSS_NLL] = (-sums / num_tokens)[0::2]
        valid = valid_pairs(batch.cu_seqlens, counted)
        shares = {
            name: torch.where(valid, values, 0.0).sum() / max(totals.num_pairs, 1)
            for name, values in per_pair.items()
        }
        total = weight * shares[names.LOSS_DPO]
        if nll_weight is not None:
            total = total + nll_weight * shares[names.LOSS_NLL]
        return LossOutput(loss=total, metrics={k: v.detach() for k, v in shares.items()})

    return Objective(name="dpo", weigh=weigh_pairs, loss=loss)


def _by_kernel(
    settings: PreferenceLossSettings, output: ModelOutput, batch: PackedBatch, totals: Totals
) -> LossOutput:
    from rl_megatron.kernels.preference_loss import preference_loss

    assert batch.loss_weights is not None, "Objective.weigh comes before Objective.loss"
    result = preference_loss(
        settings,
        output.logprobs,
        batch.ref_logprobs,
        batch.loss_weights,
        batch.cu_seqlens,
        1 / max(totals.num_pairs, 1),
    )
    return LossOutput(result.loss, result.metrics)
