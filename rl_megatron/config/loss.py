"""What is minimised. Field names are the keyword names of the functions in `losses/`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from rl_megatron.config.base import Idle, Problem, Strict

KLEstimator = Literal["k1", "k2", "k3"]
LossMode = Literal["vanilla", "gspo", "cispo"]
UnpairedLossType = Literal["kto", "apo_zero_unpaired"]
PairLossType = Literal["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "simpo", "orpo"]

# Losses of a pair: those that average log-probs over the tokens of a response instead of summing
# them, those without a reference, and those that read label_smoothing.
LENGTH_AVERAGED = ("sigmoid_norm", "ipo", "simpo", "orpo")
REFERENCE_FREE = ("simpo", "orpo")
SMOOTHED = ("sigmoid", "sigmoid_norm", "robust")


class GRPOLossConfig(Strict):
    """The policy loss, and terms for KL and entropy where they are wanted in the loss."""

    loss_mode: LossMode = "vanilla"
    """vanilla: the ratio of each token is clipped (PPO, GRPO, DAPO). gspo: the ratio of the whole
    response is; in the paper with seq-mean-token-mean. cispo: log-probs are weighted by the clipped
    ratio, so that a clipped token keeps its gradient."""

    loss_agg_mode: Literal[
        "token-mean",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "token-sum",
    ] = "token-mean"
    """How per-token losses of a mini-batch become one number. seq-mean-token-sum-norm is
    Dr.GRPO's: the sum over (sequences times `rollout.max_response_tokens`)."""

    clip_ratio_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio of new to old probability is clipped below 1 minus this; 1.0: not at all."""

    clip_ratio_high: PositiveFloat = 0.2
    """The ratio is clipped above 1 plus this."""

    clip_ratio_c: float | None = Field(default=3.0, gt=1)
    """Dual clip: the loss of a token with a negative advantage is at most this times the size of
    the advantage; null: off."""

    use_kl_loss: bool = False
    """Add `kl_loss_coef` times the KL from the reference to the loss."""

    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of the KL in the loss; 0: record the KL without using it."""

    kl_loss_type: KLEstimator = "k3"
    """Estimator of the KL. As a loss, k2 has the exact gradient of the KL, k3 a biased one with
    little noise, and k1 an expected gradient of zero."""

    allow_k1_loss: bool = False
    """Accept k1 as a loss all the same."""

    entropy_coef: NonNegativeFloat = 0.0
    """This times the entropy is subtracted from the loss, aggregated alike; 0: no bonus."""

    def problems(self) -> Iterable[Problem]:
        """k1 as a loss."""
        if self.use_kl_loss and self.kl_loss_type == "k1" and not self.allow_k1_loss:
            yield Problem(
                "kl_loss_type",
                self.kl_loss_type,
                "as a loss k1 has an expected gradient of zero: it adds noise and holds nothing "
                "back; take k2 (exact gradient) or k3, use algorithm.use_kl_in_reward instead, or "
                "set loss.allow_k1_loss=true",
                others=("use_kl_loss", "allow_k1_loss"),
            )

    def idle(self) -> Mapping[str, Idle]:
        """The settings of a KL term that is off, and a bound that the mode does not have."""
        idle = {}
        if self.loss_mode == "cispo":
            reason = (
                "loss.loss_mode cispo bounds the weight of both signs of the advantage by "
                "clip_ratio_high; remove this key"
            )
            idle["clip_ratio_c"] = Idle(reason, ("loss_mode",))
        if not self.use_kl_loss:
            reason = "loss.use_kl_loss is false; set it to true, or remove this key"
            off = Idle(reason, ("use_kl_loss",))
            idle |= dict.fromkeys(("kl_loss_coef", "kl_loss_type", "allow_k1_loss"), off)
        elif self.kl_loss_type != "k1":
            reason = f"loss.kl_loss_type is {self.kl_loss_type}; remove this key"
            idle["allow_k1_loss"] = Idle(reason, ("kl_loss_type",))
        return idle


class RewardModelLossConfig(Strict):
    """The loss of a reward model: -logsigmoid(reward of chosen - reward of rejected - margin)."""

    center_rewards_coefficient: PositiveFloat | None = None
    """Weight of (reward of chosen + reward of rejected) squared, a mean over pairs, in the loss:
    rewards stay around 0 (usual: 0.01). null: off."""


class DPOLossConfig(Strict):
    """The loss of a preference pair."""

    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference. simpo: scale of the log-probs (its paper: 2 and
    more); orpo: weight of the odds ratio."""

    loss_type: PairLossType = "sigmoid"
    """sigmoid: DPO, eq. 7, with label_smoothing conservative DPO. sigmoid_norm: the same on
    log-probs averaged over tokens. robust: unbiased where label_smoothing of the labels are wrong.
    hinge: no loss above margin 1. ipo: margins per token towards 1 / (2 beta). simpo, orpo: without
    a reference, on averaged log-probs."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a preference is the wrong way round (sigmoid, sigmoid_norm, robust)."""

    simpo_gamma: NonNegativeFloat = 0.5
    """Margin that simpo asks for, in units of the margin."""

    rpo_alpha: PositiveFloat | None = None
    """Weight of the chosen response's mean negative log-prob per token, added to the loss;
    null: off. orpo has it by itself, with weight 1."""

    @property
    def is_reference_free(self) -> bool:
        """Whether the loss has no use for a reference."""
        return self.loss_type in REFERENCE_FREE

    def problems(self) -> Iterable[Problem]:
        """A correction for wrong labels without any."""
        if self.loss_type == "robust" and self.label_smoothing == 0:
            yield Problem(
                "label_smoothing",
                0.0,
                "loss.loss_type robust corrects for labels that are wrong with this probability; "
                "set it, e.g. to 0.1, or take loss_type=sigmoid",
                others=("loss_type",),
            )

    def idle(self) -> Mapping[str, Idle]:
        """What the loss type does not read."""
        reason = f"loss.loss_type {self.loss_type} does not read it; remove this key"
        off = Idle(reason, ("loss_type",))
        idle = {}
        if self.loss_type not in SMOOTHED:
            idle["label_smoothing"] = off
        if self.loss_type != "simpo":
            idle["simpo_gamma"] = off
        if self.loss_type == "orpo":
            idle["rpo_alpha"] = off
        return idle


class KTOLossConfig(Strict):
    """The loss of a response that is desirable or not."""

    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference."""

    loss_type: UnpairedLossType = "kto"
    """kto: rewards are measured from the KL of policy and reference, eq. 7 and 8 of its paper.
    apo_zero_unpaired: from 0, which costs no KL; for data that are better than the model."""

    desirable_weight: PositiveFloat = 1.0
    """Weight of a desirable response. Its paper: number times weight of the desirable ones between
    1 and 4/3 of that of the undesirable ones."""

    undesirable_weight: PositiveFloat = 1.0
    """Weight of an undesirable response."""
