"""Trainer and engine in one process."""

from __future__ import annotations

from rl_megatron.interfaces.protocols import PolicyBackend, RolloutEngine


class InProcessSync:
    """The `WeightSync` protocol where the engine can read the trainer's tensors."""

    def __init__(self, policy: PolicyBackend, engine: RolloutEngine) -> None:
        self._policy = policy
        self._engine = engine

    def push(self, policy_version: int) -> None:
        """Make the engine sample from the trainer's current weights."""
        self._engine.load_weights(self._policy.named_weights(), policy_version)
