"""The learning rate of a step, as a function of the step alone."""

from __future__ import annotations

import math

from rl_megatron.config.optimizer import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, step: int, num_steps: int) -> float:
    """Learning rate of optimiser step `step`, counted from 1.

    It rises linearly to `lr` at step `lr_warmup_steps`, and then follows the schedule, which ends
    at `min_lr` at step `num_steps`. There is no state: a resumed run cannot disagree with itself.

    Example:
        lr 1e-4, 10 warm-up steps, cosine to 0 at step 100: step 5 has 5e-5, step 40 has 7.5e-5.
    """
    warmup = optimizer.lr_warmup_steps
    if step <= warmup:
        return optimizer.lr * step / warmup
    if optimizer.lr_schedule == "constant":
        return optimizer.lr
    done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    left = 1 - done if optimizer.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * left
