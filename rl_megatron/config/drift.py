"""How far the policy of DPO may move from its reference, and how that is watched."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from rl_megatron.config.base import Strict


class DriftConfig(Strict):
    """The KL divergence of policy and reference on fixed held-out prompts."""

    kl_snapshot_interval: NonNegativeInt = 200
    """Steps between measurements, on responses that the policy samples to the evaluation's prompts.
    A copy of the reference waits in host memory for it. 0: none."""

    num_prompts: PositiveInt = 64
    """Prompts used, from the first."""

    kl_growth_window: PositiveInt = 1000
    """Steps that a measurement is compared over."""

    kl_growth_factor: float = Field(default=2.0, gt=1)
    """Growth over the window that raises an alarm."""

    kl_floor: NonNegativeFloat = 1.0
    """A KL of a response below this many nats is not compared: from 0 every growth is large."""

    stop_on_growth: bool = False
    """End the run at an alarm, after a checkpoint, instead of warning."""
