"""Adam, its learning-rate schedule and gradient clipping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from rl_megatron.config.base import Idle, Problem, Strict


class OptimizerConfig(Strict):
    """AdamW with a warm-up and a schedule counted in optimiser steps."""

    lr: PositiveFloat = 1e-6
    """Learning rate at the end of the warm-up."""

    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the last step of a linear or cosine schedule."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls between the warm-up and the last step."""

    lr_warmup_steps: NonNegativeInt = 0
    """Optimiser steps over which the learning rate rises from 0."""

    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; biases and norms are spared."""

    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of the gradient."""

    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the mean of the squared gradient."""

    adam_eps: PositiveFloat = 1e-8
    """Added to the denominator of Adam's update."""

    clip_grad: NonNegativeFloat = 1.0
    """Largest gradient norm over all parameters; 0: no clipping."""

    def problems(self) -> Iterable[Problem]:
        """A schedule that would rise."""
        if self.lr_schedule != "constant" and self.min_lr > self.lr:
            yield Problem(
                "min_lr",
                self.min_lr,
                f"must not be above optimizer.lr ({self.lr}); lower it",
                others=("lr",),
            )

    def idle(self) -> Mapping[str, Idle]:
        """`min_lr` of a schedule that does not fall."""
        if self.lr_schedule == "constant":
            reason = "optimizer.lr_schedule is constant; take linear or cosine, or remove this key"
            return {"min_lr": Idle(reason, ("lr_schedule",))}
        return {}
