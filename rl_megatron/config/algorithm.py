"""How rewards become advantages, and the KL in the reward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from rl_megatron.config.base import Idle, Problem, Strict
from rl_megatron.config.loss import KLEstimator


class FixedKLConfig(Strict):
    """A KL coefficient that stays as it is."""

    type: Literal["fixed"] = "fixed"
    """The coefficient stays as it is."""


class AdaptiveKLConfig(Strict):
    """A KL coefficient that follows a moving average of the measured KL: it grows by a tenth while
    the average is above 1.5 times the target, and shrinks by 3 % otherwise."""

    type: Literal["adaptive"]
    """The coefficient holds the KL near `target_kl`."""

    target_kl: PositiveFloat
    """The KL of a response, summed over its tokens, that is aimed at, in nats."""

    ema_decay: float = Field(default=0.9, ge=0, lt=1)
    """Weight of the past in the moving average of the KL; 0: the last rollout batch alone."""

    min_kl_coef: NonNegativeFloat = 0.0
    """The coefficient never falls below this."""

    max_kl_coef: PositiveFloat | None = None
    """The coefficient never rises above this; null: no bound."""

    def problems(self) -> Iterable[Problem]:
        """Bounds that cross."""
        if self.max_kl_coef is not None and self.min_kl_coef > self.max_kl_coef:
            yield Problem(
                "min_kl_coef",
                self.min_kl_coef,
                f"must not be above max_kl_coef ({self.max_kl_coef}); lower it",
                others=("max_kl_coef",),
            )


KLControlConfig = Annotated[FixedKLConfig | AdaptiveKLConfig, Field(discriminator="type")]


class AlgorithmConfig(Strict):
    """Advantages of GRPO and its relatives, and which tokens they are of."""

    adv_estimator: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ] = "grpo"
    """grpo: reward minus the group's mean, over its standard deviation. dr_grpo: minus the mean
    only. rloo: minus the mean of the others in the group. reinforce_plus_plus: the reward itself,
    whitened over the tokens of the whole rollout batch; ..._baseline: minus the group's mean
    first."""

    adv_eps: PositiveFloat = 1e-4
    """Added to the standard deviation (grpo, and what is whitened)."""

    adv_clip: PositiveFloat | None = None
    """Advantages are clamped to plus or minus this; null: off."""

    mask_truncated_responses: bool = False
    """Do not train on responses that were cut at `rollout.max_response_tokens` (DAPO's overlong
    filtering). Their rewards stay part of their group's mean."""

    rollout_is: Literal["none", "truncate", "mask"] = "none"
    """Importance weights old / rollout probability on the policy loss, which make up for an engine
    whose log-probs are not quite the trainer's. truncate: at most `rollout_is_threshold` (C). mask:
    0 outside 1/C .. C."""

    rollout_is_level: Literal["token", "sequence"] = "token"
    """token: each token has its own weight. sequence: the product over its response."""

    rollout_is_threshold: float = Field(default=2.0, gt=1)
    """Bound of the importance weights."""

    use_kl_in_reward: bool = False
    """Subtract `kl_coef` times the KL from the reference from the rewards."""

    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL in the reward."""

    kl_estimator: KLEstimator = "k1"
    """Estimator of the KL in the reward; k1 is unbiased there."""

    kl_ctrl: KLControlConfig = FixedKLConfig()
    """Whether `kl_coef` adapts to the measured KL."""

    def problems(self) -> Iterable[Problem]:
        """A KL term of weight zero."""
        if self.use_kl_in_reward and self.kl_coef == 0:
            yield Problem(
                "kl_coef",
                self.kl_coef,
                "algorithm.use_kl_in_reward needs a coefficient above 0; set one, e.g. 0.001, or "
                "set algorithm.use_kl_in_reward=false",
                others=("use_kl_in_reward",),
            )

    def idle(self) -> Mapping[str, Idle]:
        """Settings that the chosen estimator, or a KL that is off, does not read."""
        idle = {}
        if self.adv_estimator in ("dr_grpo", "rloo"):
            reason = (
                f"algorithm.adv_estimator {self.adv_estimator} does not divide by the standard "
                "deviation; remove this key"
            )
            idle["adv_eps"] = Idle(reason, ("adv_estimator",))
        if self.rollout_is == "none":
            reason = "algorithm.rollout_is is none; set it to truncate or mask, or remove this key"
            off = Idle(reason, ("rollout_is",))
            idle |= dict.fromkeys(("rollout_is_level", "rollout_is_threshold"), off)
        if not self.use_kl_in_reward:
            reason = "algorithm.use_kl_in_reward is false; set it to true, or remove this key"
            off = Idle(reason, ("use_kl_in_reward",))
            idle |= dict.fromkeys(("kl_coef", "kl_estimator", "kl_ctrl"), off)
        return idle
