"""KL divergence of the policy from the reference: estimators, and the coefficient in the reward.

Every estimator is a function of r = ref_logprobs - logprobs at one token sampled from the policy
(John Schulman, "Approximating KL Divergence", 2020). An estimator that is right in value need not
be right when it is differentiated as a loss, on policy:

| estimator | value     | expected gradient as a loss                                         |
|-----------|-----------|---------------------------------------------------------------------|
| k1        | unbiased  | zero: as a loss it does nothing                                     |
| k2        | biased    | exactly that of KL(policy \\|\\| reference)                           |
| k3        | unbiased  | that of KL(reference \\|\\| policy), the other direction: not the same |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_megatron.errors import NumericsError
from rl_megatron.losses.sums import segment_sum, zero_outside

MAX_LOG_RATIO = 20.0

KLEstimator = Literal["k1", "k2", "k3"]


def k1(r: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """-r. Value unbiased, may be negative; as a loss its expected gradient is zero."""
    return -r


def k2(r: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """r^2 / 2. Value biased; as a loss its expected gradient is the exact KL gradient."""
    return r.square() / 2


def k3(r: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """exp(r) - 1 - r, float64. Value unbiased, never negative; as a loss not the KL gradient.

    float64 because the terms cancel: in float32 the result is noise below r = 1e-3. Above r = 20
    the value stays what it is at 20, with gradient 0, lest one token decide the whole step.
    """
    bounded = r.double().clamp(max=MAX_LOG_RATIO)
    return torch.expm1(bounded) - bounded


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def sequence_kl(
    logprobs: Float[Tensor, " T"],
    ref_logprobs: Float[Tensor, " T"],
    response_mask: Bool[Tensor, " T"],
    cu_seqlens: Int[Tensor, " N_plus_1"],
    kl_estimator: KLEstimator,
) -> Float[Tensor, " N"]:
    """KL estimate of each response against the reference, summed over its tokens, float64."""
    r = zero_outside(response_mask, ref_logprobs) - zero_outside(response_mask, logprobs)
    return segment_sum(KL_ESTIMATORS[kl_estimator](r), cu_seqlens)


def kl_penalised_rewards(
    rewards: Sequence[float | None], sequence_kl: Float[Tensor, " N"], kl_coef: float
) -> list[float | None]:
    """Rewards less kl_coef times each response's KL; a missing reward stays missing.

    Raises:
        NumericsError: A KL is not finite; the penalised reward would look like a missing one.
    """
    if not sequence_kl.isfinite().all():
        first = int((~sequence_kl.isfinite()).nonzero()[0])
        raise NumericsError(
            f"the KL of rollout {first} to the reference is {float(sequence_kl[first])}; "
            "look for non-finite log-probs of the policy or the reference"
        )
    return [
        None if reward is None else reward - kl_coef * kl
        for reward, kl in zip(rewards, sequence_kl.tolist(), strict=True)
    ]


class KLController:
    """The coefficient of the KL in the reward, held fixed or steered towards a target.

    Attributes:
        kl_coef: The coefficient now.
    """

    def __init__(
        self,
        kl_coef: float,
        target_kl: float | None = None,
        *,
        ema_decay: float = 0.9,
        min_kl_coef: float = 0.0,
        max_kl_coef: float | None = None,
    ) -> None:
        """Start at `kl_coef`.

        Args:
            kl_coef: First coefficient.
            target_kl: KL to steer towards, in the units `update` is given; None holds the
                coefficient fixed.
            ema_decay: Weight of the past in the moving average of the KL.
            min_kl_coef: The coefficient never falls below this.
            max_kl_coef: The coefficient never rises above this; None: no bound.
        """
        self.kl_coef = kl_coef
        self._target_kl = target_kl
        self._ema_decay = ema_decay
        self._min_kl_coef = min_kl_coef
        self._max_kl_coef = math.inf if max_kl_coef is None else max_kl_coef
        self._ema_kl: float | None = None

    def update(self, kl: float) -> None:
        """Take in the KL of one rollout batch: times 1.1 above 1.5 targets, else times 0.97.

        Raises:
            NumericsError: The KL is not finite.
        """
        if not math.isfinite(kl):
            raise NumericsError(
                f"the KL to the reference is {kl}; kl_coef cannot follow it: "
                "look for non-finite log-probs of the policy or the reference"
            )
        if self._target_kl is None:
            return
        decay = self._ema_decay
        self._ema_kl = kl if self._ema_kl is None else decay * self._ema_kl + (1 - decay) * kl
        moved = self.kl_coef * (1.1 if self._ema_kl > 1.5 * self._target_kl else 0.97)
        self.kl_coef = min(max(moved, self._min_kl_coef), self._max_kl_coef)

    def state_dict(self) -> dict[str, float | None]:
        """What a resumed run needs; plain numbers."""
        return {"kl_coef": self.kl_coef, "ema_kl": self._ema_kl}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Undo `state_dict`. A fixed coefficient keeps the value of the configuration."""
        if self._target_kl is not None:
            assert state["kl_coef"] is not None, "state_dict always holds a coefficient"
            self.kl_coef = state["kl_coef"]
            self._ema_kl = state["ema_kl"]
