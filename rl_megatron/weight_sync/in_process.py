"""Trainer and engine in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rl_megatron.interfaces.protocols import PolicyBackend, RolloutEngine


class InProcessSync:
    """The `WeightSync` protocol where the engine can read the trainer's tensors."""

    def __init__(self, policy: PolicyBackend, engine: RolloutEngine) -> None:
        self._policy = policy
        self._engine = engine

    @contextmanager
    def sampling(self, policy_version: int = 0) -> Iterator[RolloutEngine]:
        """The engine, awake with the trainer's current weights; see `WeightSync`."""
        self._engine.wake()
        self._engine.load_weights(self._policy.named_weights(), policy_version)
        yield self._engine
        self._engine.sleep()
