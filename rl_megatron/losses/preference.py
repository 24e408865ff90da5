"""Losses of a preference pair, as functions of the implicit rewards of its two responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_megatron.errors import ConfigError


class ImplicitRewards(NamedTuple):
    """beta times the log-ratio of policy and reference, per pair."""

    chosen: Float[Tensor, " P"]
    rejected: Float[Tensor, " P"]

    @property
    def margins(self) -> Float[Tensor, " P"]:
        """Chosen less rejected."""
        return self.chosen - self.rejected


PairLoss = Callable[[ImplicitRewards], Tensor]


def implicit_rewards(
    logps: Float[Tensor, " N"], ref_logps: Float[Tensor, " N"], beta: float
) -> ImplicitRewards:
    """beta * (logps - ref_logps) of chosen and rejected (arXiv 2305.18290, eq. 5 without log Z).

    Args:
        logps: Log-prob of each response: chosen, rejected, chosen, ...; a sum over its tokens, or
            their mean.
        ref_logps: The same under the reference.
        beta: Strength of the pull towards the reference.
    """
    rewards = beta * (logps - ref_logps)
    return ImplicitRewards(rewards[0::2], rewards[1::2])


def sigmoid_loss(margins: Float[Tensor, " P"], label_smoothing: float) -> Float[Tensor, " P"]:
    """-(1 - e) * logsigmoid(margin) - e * logsigmoid(-margin), e the label smoothing.

    DPO (arXiv 2305.18290, eq. 7); with e > 0 conservative DPO, for labels that are wrong with
    probability e. At margin 0 it is ln 2 for every e.
    """
    return -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)


def robust_loss(margins: Float[Tensor, " P"], label_smoothing: float) -> Float[Tensor, " P"]:
    """(-(1 - e) * logsigmoid(margin) + e * logsigmoid(-margin)) / (1 - 2 e).

    Robust DPO (arXiv 2403.00409, eq. 7): its mean over labels that are flipped with probability
    e < 1/2 is the loss of the right labels.
    """
    right, flipped = -logsigmoid(margins), -logsigmoid(-margins)
    return ((1 - label_smoothing) * right - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def hinge_loss(margins: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
    """max(0, 1 - margin), as SLiC has it on implicit rewards (arXiv 2309.06657, eq. 6)."""
    return torch.relu(1 - margins)


def ipo_loss(margins: Float[Tensor, " P"], beta: float) -> Float[Tensor, " P"]:
    """(margin / beta - 1 / (2 beta))^2 (arXiv 2310.12036, eq. 17, beta being its tau)."""
    return (margins / beta - 1 / (2 * beta)).square()


def odds_ratio_loss(
    chosen: Float[Tensor, " P"], rejected: Float[Tensor, " P"]
) -> Float[Tensor, " P"]:
    """-logsigmoid(ln odds(chosen) - ln odds(rejected)), odds(p) = p / (1 - p).

    ORPO (arXiv 2403.07691, eq. 4 and 7).

    Args:
        chosen: Mean log-prob per token, so p is the geometric mean of the tokens' probabilities.
            Below 0: a response that is certain has infinite odds.
        rejected: The same of the rejected response.
    """
    log_odds = (chosen - _log_complement(chosen)) - (rejected - _log_complement(rejected))
    return -logsigmoid(log_odds)


def _log_complement(log_p: Tensor) -> Tensor:
    """ln(1 - p), exact for p close to 1 as well."""
    return torch.log(-torch.expm1(log_p))


def pair_loss(
    loss_type: str, beta: float, label_smoothing: float = 0.0, simpo_gamma: float = 0.0
) -> PairLoss:
    """The function from implicit rewards to losses that `loss_type` names.

    sigmoid_norm is `sigmoid_loss` on rewards of mean log-probs; simpo is -logsigmoid(margin -
    simpo_gamma) on the same without a reference (arXiv 2405.14734, eq. 6).

    Raises:
        ConfigError: There is no such loss.
    """
    formulas: dict[str, PairLoss] = {
        "sigmoid": lambda rewards: sigmoid_loss(rewards.margins, label_smoothing),
        "sigmoid_norm": lambda rewards: sigmoid_loss(rewards.margins, label_smoothing),
        "robust": lambda rewards: robust_loss(rewards.margins, label_smoothing),
        "hinge": lambda rewards: hinge_loss(rewards.margins),
        "ipo": lambda rewards: ipo_loss(rewards.margins, beta),
        "simpo": lambda rewards: sigmoid_loss(rewards.margins - simpo_gamma, 0.0),
        "orpo": lambda rewards: odds_ratio_loss(rewards.chosen / beta, rewards.rejected / beta),
    }
    if loss_type not in formulas:
        known = ", ".join(formulas)
        raise ConfigError(f"loss.loss_type: {loss_type!r} is not offered; use one of: {known}")
    return formulas[loss_type]
