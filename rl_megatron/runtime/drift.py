"""How far the policy has moved from its reference, measured on what it says, and when to worry."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl_megatron.config.drift import DriftConfig
from rl_megatron.data.packing import pack_rollouts
from rl_megatron.interfaces import metric_names as names
from rl_megatron.interfaces.protocols import PolicyBackend, Scorer, WeightSync
from rl_megatron.interfaces.records import Prompt, Sampling
from rl_megatron.losses.kl import sequence_kl

logger = logging.getLogger(__name__)

_ADVICE = (
    "What helps: a lower optimizer.lr; more, and more diverse, pairs; another loss.beta: a smaller "
    "one shrinks each update, a larger one moves the optimum towards the reference."
)


@dataclass
class GrowthAlarm:
    """Compares each KL with the oldest one in a window of steps.

    Attributes:
        window: Steps.
        factor: Growth that is too much.
        floor: KL in nats below which nothing is compared.
        history: (step, KL) of the measurements in the window.
    """

    window: int
    factor: float
    floor: float
    history: list[tuple[int, float]] = field(default_factory=list)

    def check(self, step: int, kl: float) -> str | None:
        """Take a measurement; what to tell the user, if it has grown too much."""
        self.history = [(at, value) for at, value in self.history if at >= step - self.window]
        self.history.append((step, kl))
        first_step, first = self.history[0]
        if first_step == step or kl <= self.factor * max(first, self.floor):
            return None
        return (
            f"the KL of policy and reference grew from {first:.4g} nats a response after step "
            f"{first_step} to {kl:.4g} after step {step}, more than drift.kl_growth_factor "
            f"{self.factor:g} times. {_ADVICE}"
        )


class KLSnapshot:
    """Measures KL(policy || reference) on responses that the policy samples to fixed prompts.

    The estimate per response is the sum over its tokens of k3 (losses/kl.py): unbiased and never
    negative. The same random numbers pick the tokens each time.
    """

    def __init__(
        self,
        settings: DriftConfig,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        sync: WeightSync,
        policy: PolicyBackend,
        reference: Scorer,
        seed: int,
    ) -> None:
        self._settings = settings
        self._prompts = prompts[: settings.num_prompts]
        self._sampling = sampling
        self._sync = sync
        self._policy = policy
        self._reference = reference
        self._seed = seed
        self.alarm = GrowthAlarm(
            settings.kl_growth_window, settings.kl_growth_factor, settings.kl_floor
        )

    def state_dict(self) -> dict[str, list[tuple[int, float]]]:
        """What a resumed run needs: the measurements that the next one is compared with."""
        return {"history": self.alarm.history}

    def load_state_dict(self, state: Mapping[str, list[tuple[int, float]]]) -> None:
        """Go on from there."""
        self.alarm.history = [(step, kl) for step, kl in state["history"]]

    def measure(self, step: int) -> tuple[dict[str, float], bool]:
        """Metrics after step `step`, and whether the run is to stop. Collective."""
        with self._sync.sampling(step) as engine:
            rollouts = engine.generate(self._prompts, self._sampling, 1, self._seed)
        batch = pack_rollouts(rollouts)
        kl = sequence_kl(
            self._policy.logprobs(batch),
            self._reference.logprobs(batch),
            batch.response_mask,
            batch.cu_seqlens,
            "k3",
        )
        mean = float(kl.mean())
        message = self.alarm.check(step, mean)
        if message is not None:
            logger.warning("%s", message)
        metrics = {
            names.DRIFT_KL: mean,
            names.DRIFT_KL_PER_TOKEN: float(kl.sum()) / max(int(batch.response_mask.sum()), 1),
            names.DRIFT_ALARM: float(message is not None),
        }
        return metrics, message is not None and self._settings.stop_on_growth
