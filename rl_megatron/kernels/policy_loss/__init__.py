"""The policy loss, its gradient and its metrics in two launches."""

from rl_megatron.kernels.policy_loss.door import (
    METRICS,
    PolicyLossResult,
    PolicyLossSettings,
    policy_loss,
)

__all__ = ["METRICS", "PolicyLossResult", "PolicyLossSettings", "policy_loss"]
