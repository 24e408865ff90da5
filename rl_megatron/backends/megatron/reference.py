"""A reference that borrows the policy's place: its weights wait in host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_megatron.backends.megatron.backend import MegatronBackend
from rl_megatron.interfaces.batch import PackedBatch


class SwappedReference:
    """Scores with reference weights swapped into the policy's model.

    Costs two copies of the weights in host memory and their transfer on each call, and no device
    memory. Values are copied, never rebound: the optimizer and its buffers keep their views.

    Args:
        policy: The model to borrow.
        source: A model of the same shape and layout that holds the reference's weights now; the
            policy itself, where the reference is its start.
    """

    def __init__(self, policy: MegatronBackend, source: MegatronBackend) -> None:
        self._policy = policy
        self._weights = _copy_weights(source)

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """Log-prob of every response token under the reference; see `PolicyBackend`."""
        policy_weights = _copy_weights(self._policy)
        self._put(self._weights)
        try:
            return self._policy.logprobs(batch)
        finally:
            self._put(policy_weights)

    def close(self) -> None:
        """Drop the weights."""
        self._weights = []

    def _put(self, weights: list[Tensor]) -> None:
        parameters = (p for chunk in self._policy.chunks for p in chunk.parameters())
        with torch.no_grad():
            for parameter, value in zip(parameters, weights, strict=True):
                parameter.copy_(value)


def _copy_weights(model: MegatronBackend) -> list[Tensor]:
    return [
        parameter.detach().to("cpu", copy=True)
        for chunk in model.chunks
        for parameter in chunk.parameters()
    ]
