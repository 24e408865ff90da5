"""The KL to the reference as a part of the reward, with its coefficient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_megatron.config.algorithm import AlgorithmConfig
from rl_megatron.interfaces import metric_names as names
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.losses import KLController, kl_penalised_rewards, sequence_kl


class KLInReward:
    """Subtracts the coefficient times each response's KL; does nothing unless it is switched on.

    Args:
        algorithm: The run's settings.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._on = algorithm.use_kl_in_reward
        self._estimator = algorithm.kl_estimator
        self._controller = KLController(
            algorithm.kl_coef, **algorithm.kl_ctrl.model_dump(exclude={"type"})
        )

    def apply(
        self, rewards: Sequence[float | None], batch: PackedBatch
    ) -> tuple[list[float | None], dict[str, float]]:
        """Rewards less the penalty, and metrics; the coefficient then moves towards its target.

        Args:
            rewards: One per sequence of the batch.
            batch: With `old_logprobs`, and `ref_logprobs` where the KL is used.
        """
        if not self._on:
            return list(rewards), {}
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None
        kl = sequence_kl(
            batch.old_logprobs,
            batch.ref_logprobs,
            batch.response_mask,
            batch.cu_seqlens,
            self._estimator,
        )
        coefficient, mean = self._controller.kl_coef, float(kl.mean())
        penalised = kl_penalised_rewards(rewards, kl, coefficient)
        self._controller.update(mean)
        return penalised, {names.REWARD_KL: mean, names.REWARD_KL_COEF: coefficient}

    def state_dict(self) -> dict[str, float | None]:
        """What a resumed run needs."""
        return self._controller.state_dict()

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Go on from there."""
        self._controller.load_state_dict(state)
