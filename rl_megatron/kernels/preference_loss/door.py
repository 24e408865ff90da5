"""From per-token log-probs of packed pairs to a preference loss, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rl_megatron.config.loss import LENGTH_AVERAGED, REFERENCE_FREE
from rl_megatron.interfaces import metric_names as names
from rl_megatron.kernels.launch import launch
from rl_megatron.kernels.preference_loss.kernels import (
    NUM_COLUMNS,
    NUM_SUMS,
    pairs_kernel,
    sequence_sums_kernel,
    spread_kernel,
)

# What stands where in the values that the kernels return.
METRICS = (
    names.LOSS_DPO,
    names.REWARDS_CHOSEN,
    names.REWARDS_REJECTED,
    names.REWARDS_MARGINS,
    names.REWARDS_ACCURACIES,
    names.LOGPS_CHOSEN,
    names.LOGPS_REJECTED,
    names.LOSS_NLL,
)
LossType = Literal["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "simpo", "orpo"]
TOKENS_BLOCK, TOKENS_WARPS = 1024, 4
PAIRS_BLOCK, PAIRS_WARPS = 32, 1
MAX_REGISTERS = 128


@dataclass(frozen=True)
class PreferenceLossSettings:
    """The numbers that `losses/dpo.py` binds into an objective, under the same names."""

    beta: float = 0.1
    loss_type: LossType = "sigmoid"
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    rpo_alpha: float | None = None

    @property
    def weights(self) -> tuple[float, float | None]:
        """Of the loss of pairs, and of the negative log-likelihood; None: no such term."""
        return (self.beta, 1.0) if self.loss_type == "orpo" else (1.0, self.rpo_alpha)


@dataclass(frozen=True)
class PreferenceLossResult:
    """What a micro-batch comes to.

    Attributes:
        loss: fp64, differentiable by the log-probs.
        metrics: Shares by name, 0-dim fp64 without gradient, those that these settings define.
    """

    loss: Float[Tensor, ""]
    metrics: dict[str, Float[Tensor, ""]]


def preference_loss(
    settings: PreferenceLossSettings,
    logprobs: Float[Tensor, " T"],
    ref_logprobs: Float[Tensor, " T"] | None,
    loss_weights: Float[Tensor, " T"],
    cu_seqlens: Int[Tensor, " N_plus_1"],
    pair_scale: float,
) -> PreferenceLossResult:
    """The loss and metrics of `losses/dpo.py`, from two launches; a third is the gradient.

    All tensors are on one GPU, and nothing waits for it. A token counts where its weight is not 0;
    what stands elsewhere is not read. A pair counts if both of its sides have such a token.

    Args:
        settings: The numbers of the loss.
        logprobs: Under the policy now, with gradient.
        ref_logprobs: Under the reference; a loss type without one does not look at it.
        loss_weights: Only whether they are 0 matters.
        cu_seqlens: Boundaries of the sequences, from 0 to T: chosen, rejected, chosen, ...
        pair_scale: What per-pair values are multiplied by: 1 / num_pairs of the mini-batch.
    """
    assert len(cu_seqlens) % 2 == 1, "sequences come in pairs: chosen, rejected"
    if settings.loss_type in REFERENCE_FREE:
        ref_logprobs = None
    else:
        assert ref_logprobs is not None, f"{settings.loss_type} needs ref_logprobs"
    loss, values = _PreferenceLoss.apply(
        logprobs, ref_logprobs, loss_weights, cu_seqlens, settings, pair_scale
    )
    metrics = dict(zip(METRICS, values.unbind(), strict=True))
    if settings.weights[1] is None:
        del metrics[names.LOSS_NLL]
    return PreferenceLossResult(loss, metrics)


class _PreferenceLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logprobs: Tensor,
        ref_logprobs: Tensor | None,
        loss_weights: Tensor,
        cu_seqlens: Tensor,
        settings: PreferenceLossSettings,
        pair_scale: float,
    ) -> tuple[Tensor, Tensor]:
        num_sequences = len(cu_seqlens) - 1
        pair_weight, nll_weight = settings.weights
        loss_weights = loss_weights.contiguous()
        sums = logprobs.new_empty(num_sequences, NUM_SUMS.value, dtype=torch.float64)
        slopes = logprobs.new_empty(num_sequences, dtype=torch.float64)
        values = logprobs.new_empty(NUM_COLUMNS.value, dtype=torch.float64)
        loss = logprobs.new_empty((), dtype=torch.float64)
        launch(
            sequence_sums_kernel,
            (max(num_sequences, 1),),
            logprobs.contiguous(),
            None if ref_logprobs is None else ref_logprobs.contiguous(),
            loss_weights,
            cu_seqlens,
            sums,
            num_sequences,
            BLOCK=TOKENS_BLOCK,
            num_warps=TOKENS_WARPS,
            enable_fp_fusion=True,
            maxnreg=MAX_REGISTERS,
        )
        launch(
            pairs_kernel,
            (1,),
            sums,
            slopes,
            values,
            loss,
            num_sequences // 2,
            settings.beta,
            settings.label_smoothing,
            settings.simpo_gamma,
            pair_weight,
            nll_weight or 0.0,
            pair_scale,
            LOSS_TYPE=settings.loss_type,
            AVERAGED=settings.loss_type in LENGTH_AVERAGED,
            BLOCK=PAIRS_BLOCK,
            num_warps=PAIRS_WARPS,
            enable_fp_fusion=True,
            maxnreg=MAX_REGISTERS,
        )
        ctx.save_for_backward(slopes, loss_weights, cu_seqlens)
        ctx.dtype = logprobs.dtype
        ctx.mark_non_differentiable(values)
        # Else a gradient of zeros is made for `values`: a launch for nothing.
        ctx.set_materialize_grads(False)
        return loss, values

    @staticmethod
    def backward(ctx: Any, g_loss: Tensor, _: None) -> tuple[Tensor | None, ...]:
        slopes, loss_weights, cu_seqlens = ctx.saved_tensors
        g_logprob = torch.empty_like(loss_weights, dtype=ctx.dtype)
        if len(slopes):
            launch(
                spread_kernel,
                (len(slopes),),
                slopes,
                g_loss,
                loss_weights,
                cu_seqlens,
                g_logprob,
                BLOCK=TOKENS_BLOCK,
                num_warps=TOKENS_WARPS,
                enable_fp_fusion=True,
                maxnreg=MAX_REGISTERS,
            )
        return g_logprob, None, None, None, None, None
