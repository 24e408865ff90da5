"""From per-token values of a packed micro-batch to the policy loss, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor

from rl_megatron.interfaces import metric_names as names
from rl_megatron.kernels.launch import launch
from rl_megatron.kernels.policy_loss.kernels import NUM_COLUMNS, sums_kernel, tokens_kernel

# What stands where in the values that the kernels return: shares, and last a maximum.
METRICS = (
    names.LOSS_POLICY,
    names.LOSS_KL,
    names.LOSS_ENTROPY,
    names.POLICY_CLIP_FRACTION_LOW,
    names.POLICY_CLIP_FRACTION_HIGH,
    names.POLICY_CLIP_FRACTION_DUAL,
    names.POLICY_RATIO_MEAN,
    names.POLICY_APPROX_KL,
    names.POLICY_ENTROPY,
    names.POLICY_KL_TO_REFERENCE,
    names.POLICY_RATIO_MAX,
)
# Tokens of a block and its warps. A sequence of mode gspo is one block that goes over its tokens.
TOKENS_BLOCK, TOKENS_WARPS = 256, 8
SEQUENCE_BLOCK, SEQUENCE_WARPS = 512, 16
SUMS_BLOCK, SUMS_WARPS = 64, 4
MAX_REGISTERS = 128


@dataclass(frozen=True)
class PolicyLossSettings:
    """The numbers that `losses/grpo.py` binds into an objective, under the same names.

    Attributes:
        clip_ratio_c: Bound of the ratio where the advantage is negative; None: no such bound.
        kl_loss_type: KL estimator that is a term of the loss; None: no such term.
    """

    loss_mode: Literal["vanilla", "gspo", "cispo"] = "vanilla"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = 3.0
    kl_loss_type: Literal["k1", "k2", "k3"] | None = None
    kl_loss_coef: float = 0.001
    entropy_coef: float = 0.0


@dataclass(frozen=True)
class PolicyLossResult:
    """What a micro-batch comes to.

    Attributes:
        loss: fp64, differentiable by log-probs and entropy.
        metrics: Shares by name, 0-dim fp64 without gradient, those that these settings define.
        ratio_max: The largest ratio of a counted token, 0 where there is none; 0-dim fp64.
    """

    loss: Float[Tensor, ""]
    metrics: dict[str, Float[Tensor, ""]]
    ratio_max: Float[Tensor, ""]


def policy_loss(
    settings: PolicyLossSettings,
    logprobs: Float[Tensor, " T"],
    entropy: Float[Tensor, " T"],
    old_logprobs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    loss_weights: Float[Tensor, " T"],
    ref_logprobs: Float[Tensor, " T"] | None,
    cu_seqlens: Int[Tensor, " N_plus_1"],
    metric_scale: float,
) -> PolicyLossResult:
    """The loss and metrics of `losses/grpo.py`, from two launches and without waiting for them.

    All tensors are on one GPU. A token counts where its weight is not 0; what stands elsewhere is
    not read. Worked out in fp64, kept in the type it came in.

    Args:
        settings: The numbers of the loss.
        logprobs: Under the policy now, with gradient.
        entropy: Of the distribution each token was drawn from; with gradient if entropy_coef.
        old_logprobs: Under the policy at the start of the step.
        advantages: Per token.
        loss_weights: Response mask times aggregation weight.
        ref_logprobs: Under the reference; None: there is none, nor metrics of it.
        cu_seqlens: Boundaries of the sequences, from 0 to T.
        metric_scale: What per-token metrics are multiplied by: 1 / num_tokens of the mini-batch.
    """
    assert settings.kl_loss_type is None or ref_logprobs is not None, "the KL needs ref_logprobs"
    loss, values = _PolicyLoss.apply(
        logprobs, entropy, old_logprobs, advantages, loss_weights, ref_logprobs, cu_seqlens,
        settings, metric_scale,
    )  # fmt: skip
    *shares, ratio_max = values[: len(METRICS)].unbind()
    absent = set()
    if settings.kl_loss_type is None:
        absent.add(names.LOSS_KL)
    if not settings.entropy_coef:
        absent.add(names.LOSS_ENTROPY)
    if ref_logprobs is None:
        absent.add(names.POLICY_KL_TO_REFERENCE)
    metrics = dict(zip(METRICS, shares, strict=False))
    return PolicyLossResult(
        loss, {name: v for name, v in metrics.items() if name not in absent}, ratio_max
    )


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logprobs: Tensor,
        entropy: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        loss_weights: Tensor,
        ref_logprobs: Tensor | None,
        cu_seqlens: Tensor,
        settings: PolicyLossSettings,
        metric_scale: float,
    ) -> tuple[Tensor, Tensor]:
        num_tokens, num_sequences = len(logprobs), len(cu_seqlens) - 1
        by_sequence = settings.loss_mode == "gspo"
        num_spans = num_sequences if by_sequence else triton.cdiv(num_tokens, TOKENS_BLOCK)
        # Without a token there is still a row of sums.
        num_spans = max(num_spans, 1)
        gradients = logprobs.new_empty(2 if settings.entropy_coef else 1, num_tokens)
        partial = logprobs.new_empty(num_spans, NUM_COLUMNS.value, dtype=torch.float64)
        values = logprobs.new_empty(NUM_COLUMNS.value, dtype=torch.float64)
        loss = logprobs.new_empty((), dtype=torch.float64)
        per_token = (logprobs, entropy, old_logprobs, advantages, loss_weights)
        launch(
            tokens_kernel,
            (num_spans,),
            *(tensor.contiguous() for tensor in per_token),
            None if ref_logprobs is None else ref_logprobs.contiguous(),
            cu_seqlens if by_sequence else None,
            gradients[0],
            gradients[1] if settings.entropy_coef else None,
            partial,
            num_tokens,
            num_sequences,
            settings.clip_ratio_low,
            settings.clip_ratio_high,
            settings.clip_ratio_c or 0.0,
            settings.kl_loss_coef,
            settings.entropy_coef,
            LOSS_MODE=settings.loss_mode,
            HAS_DUAL=settings.clip_ratio_c is not None,
            KL_TYPE=settings.kl_loss_type,
            BLOCK=SEQUENCE_BLOCK if by_sequence else TOKENS_BLOCK,
            num_warps=SEQUENCE_WARPS if by_sequence else TOKENS_WARPS,
            enable_fp_fusion=True,
            maxnreg=MAX_REGISTERS,
        )
        launch(
            sums_kernel,
            (1,),
            partial,
            values,
            loss,
            num_spans,
            settings.kl_loss_coef if settings.kl_loss_type else 0.0,
            settings.entropy_coef,
            metric_scale,
            BLOCK=SUMS_BLOCK,
            num_warps=SUMS_WARPS,
            enable_fp_fusion=True,
            maxnreg=MAX_REGISTERS,
        )
        ctx.save_for_backward(gradients)
        ctx.mark_non_differentiable(values)
        # Else a gradient of zeros is made for `values`: a launch for nothing.
        ctx.set_materialize_grads(False)
        return loss, values

    @staticmethod
    def backward(ctx: Any, g_loss: Tensor, _: None) -> tuple[Tensor | None, ...]:
        # One launch for both gradients.
        scaled = ctx.saved_tensors[0] * g_loss
        return scaled[0], scaled[1] if len(scaled) > 1 else None, *[None] * 7
