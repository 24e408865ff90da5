"""Runs that hold the policy near a reference: DPO and KTO."""

from __future__ import annotations

from collections.abc import Mapping

from rl_megatron.config.base import Idle
from rl_megatron.config.data import JudgedDataConfig
from rl_megatron.config.drift import DriftConfig
from rl_megatron.config.loss import DPOLossConfig, KTOLossConfig
from rl_megatron.config.reference import DPOReferenceConfig
from rl_megatron.config.runs import StepRunBase


class ReferencedRun(StepRunBase):
    """What DPO and KTO share: a frozen reference, and how far the policy may move from it."""

    reference: DPOReferenceConfig = DPOReferenceConfig()

    drift: DriftConfig = DriftConfig()

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads log-probs of the reference."""
        return True

    @property
    def watches_drift(self) -> bool:
        """Whether the KL to the reference is measured while the run goes on."""
        return self.drift.kl_snapshot_interval > 0 and "drift" not in self.idle()

    def idle(self) -> Mapping[str, Idle]:
        """One pass over the head, and a drift that nothing is measured on."""
        reason = "a loss of whole responses is known only after all their tokens; remove this key"
        idle = {**super().idle(), "kernels.one_pass": Idle(reason, ())}
        if self.evaluation is None:
            reason = "there are no prompts to measure it on; add an evaluation, or remove this key"
            idle["drift"] = Idle(reason, ("evaluation",))
        return idle


class DPORun(ReferencedRun):
    """Direct preference optimisation: chosen responses against rejected ones."""

    loss: DPOLossConfig = DPOLossConfig()

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads log-probs of the reference."""
        return not self.loss.is_reference_free

    def idle(self) -> Mapping[str, Idle]:
        """One pass over the head, and a reference that the loss does not read."""
        idle = dict(super().idle())
        if self.loss.is_reference_free:
            reason = f"loss.loss_type {self.loss.loss_type} has no reference; remove this key"
            idle |= dict.fromkeys(("reference", "drift"), Idle(reason, ("loss.loss_type",)))
        return idle


class KTORun(ReferencedRun):
    """Kahneman-Tversky optimisation: responses that are each desirable or not."""

    data: JudgedDataConfig

    loss: KTOLossConfig = KTOLossConfig()

    def idle(self) -> Mapping[str, Idle]:
        """One pass over the head, and kernels of losses."""
        reason = "KTO works on one number a response, by torch; remove this key"
        return {**super().idle(), "kernels.losses": Idle(reason, ())}
