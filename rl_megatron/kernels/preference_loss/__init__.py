"""A preference loss, its gradient and its metrics in three launches."""

from rl_megatron.kernels.preference_loss.door import (
    METRICS,
    LossType,
    PreferenceLossResult,
    PreferenceLossSettings,
    preference_loss,
)

__all__ = [
    "METRICS",
    "LossType",
    "PreferenceLossResult",
    "PreferenceLossSettings",
    "preference_loss",
]
