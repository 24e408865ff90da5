"""One micro-batch as the model wants it: targets, padding that the layout needs, and the way back.

Row t of the model's output speaks about token t + 1. Only rows that predict a response token have
a target; so a row is computed by the head only if somebody uses it, and nothing can leak from one
sequence into the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.objective import ModelOutput
from rl_megatron.models.gpt import PolicyModel
from rl_megatron.models.sequence import SequenceContext, packed_context


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that go through the model together.

    Attributes:
        batch: The sequences, on the device of the model; there may be none.
        tokens: [1, T + tail] token ids; the tail is a dummy sequence that lets the layout divide.
        cu_seqlens: Boundaries with the tail, on the host.
        targets: [T + tail] token that each row predicts, -1 where nobody asks.
    """

    batch: PackedBatch
    tokens: Tensor
    cu_seqlens: Tensor
    targets: Tensor

    def context(self, model: PolicyModel) -> SequenceContext:
        """What the attention layers of `model` need to know."""
        return packed_context(self.cu_seqlens, model.inverse_frequencies, self.tokens.device)

    def output(self, rows: Tensor) -> ModelOutput:
        """Log-probs and entropy of the batch's tokens from the model's rows [2, T + tail]."""
        size = self.batch.num_tokens
        if size == 0:
            return ModelOutput(rows[0, :0], rows[1, :0])
        shifted = torch.nn.functional.pad(rows[:, : size - 1], (1, 0))
        return ModelOutput(shifted[0], shifted[1])


def make_micro_batch(batch: PackedBatch, token_multiple: int, device: torch.device) -> MicroBatch:
    """The micro-batch of all sequences of `batch` (on the host)."""
    size = batch.num_tokens
    tail = -size % token_multiple if size else max(token_multiple, 1)
    next_token = batch.tokens.roll(-1)
    asked = batch.response_mask.roll(-1)
    if size:
        asked[-1] = False
    targets = torch.where(asked, next_token, -1)
    bounds = batch.cu_seqlens
    if tail:
        bounds = torch.cat([bounds, bounds[-1:] + tail])
    return MicroBatch(
        batch=batch.to(device),
        tokens=torch.nn.functional.pad(batch.tokens, (0, tail))[None].to(device),
        cu_seqlens=bounds,
        targets=torch.nn.functional.pad(targets, (0, tail), value=-1).to(device),
    )
