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
from rl_megatron.models.balance import Balance, BalanceLoss
from rl_megatron.models.gpt_model import HiddenStatesModel
from rl_megatron.models.sequence import SequenceContext, packed_context
from rl_megatron.parallel.context import ContextSplit, gather_rows, split_tokens
from rl_megatron.parallel.process import Process


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that go through the model together.

    The model sees M tokens: those of the batch in their places, padding elsewhere.

    Attributes:
        batch: The sequences, on the device of the model; there may be none.
        place: [T] where each token of the batch is among the M.
        tokens: [1, M] token ids, or this rank's part of them under context parallelism.
        predicted: [M] which token of the batch each row predicts, -1 where nobody asks; or this
            rank's part.
        targets: [M] id of that token, -1 where nobody asks; or this rank's part.
        cu_seqlens: Boundaries among the M tokens, on the host.
        split: How the M tokens lie on context-parallel ranks.
        scored: Of a reward model: place of each sequence's last token among the M, -1 without
            one. Its targets are 0 at these places.
    """

    batch: PackedBatch
    place: Tensor
    tokens: Tensor
    predicted: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    split: ContextSplit | None
    scored: Tensor | None = None

    def context(
        self, model: HiddenStatesModel, balance: BalanceLoss | None = None
    ) -> SequenceContext:
        """What the layers of `model` need to know; their routers too, in a step with `balance`."""
        device = self.tokens.device
        context = packed_context(self.cu_seqlens, model.inverse_frequencies, device, self.split)
        if balance is not None:
            segments = self._router_segments(model.process)
            context.balance = Balance(balance, segments, self.batch.lengths)
        return context

    def output(self, rows: Tensor) -> ModelOutput:
        """Log-probs and entropy [T] of the batch's tokens from the model's rows [2, M], or the
        scores [N] of its sequences from the rows [1, M] of a reward model.

        Under context parallelism every rank gets those of all tokens, so a loss may be any
        function of whole sequences.
        """
        if self.split is not None:
            rows = gather_rows(rows, self.split)
        if self.scored is not None:
            has_tokens = self.scored >= 0
            scores = torch.where(has_tokens, rows[0, self.scored.clamp(min=0)], 0.0)
            return ModelOutput.of_scores(scores)
        # What row t says goes to place t + 1. Rows without a target hold 0, so a first token gets
        # 0 from the row before it.
        shifted = torch.nn.functional.pad(rows, (1, 0))[:, self.place]
        return ModelOutput(shifted[0], shifted[1])

    def _router_segments(self, process: Process) -> Tensor:
        """Sequence of each token that the routers of this rank see; -1 for padding."""
        segments = self.place.new_full((int(self.cu_seqlens[-1]),), -1)
        segments[self.place] = self.batch.segment_ids
        if self.split is not None:
            segments = segments[self.split.local]
        if process.layout.sequence_parallel:
            segments = segments.chunk(process.layout.tensor)[process.tensor_rank]
        return segments


def make_micro_batch(
    batch: PackedBatch, process: Process, packed: bool, scalar_head: bool = False
) -> MicroBatch:
    """The micro-batch of all sequences of `batch` (on the host).

    Args:
        batch: May hold no sequence: the model then runs on padding alone.
        process: This rank; its layout says what the number of tokens must divide by.
        packed: Sequences end to end; otherwise each is padded to the longest.
        scalar_head: For a reward model, which is asked at the last token of each sequence.
    """
    place, bounds = _lay_out(batch, packed)
    size = int(bounds[-1])
    # The tail is a sequence of its own, which nobody looks at.
    tail = process.layout.tail(size)
    if tail:
        bounds = torch.cat([bounds, bounds[-1:] + tail])
    tokens = torch.zeros(size + tail, dtype=torch.int64)
    predicted = torch.full((size + tail,), -1)
    targets = torch.full((size + tail,), -1)
    tokens[place] = batch.tokens
    scored = None
    if scalar_head:
        scored = _last_places(batch, place)
        targets[scored[scored >= 0]] = 0
    else:
        asked = torch.nonzero(batch.response_mask)[:, 0]
        predicted[place[asked] - 1] = asked
        targets[place[asked] - 1] = batch.tokens[asked]
    split = None
    if process.layout.context > 1:
        assert process.context_group is not None
        split = split_tokens(size + tail, process.context_group)
        tokens, targets = tokens[split.local], targets[split.local]
        predicted = predicted[split.local]
        split = split.to(process.device)
    return MicroBatch(
        batch=batch.to(process.device),
        place=place.to(process.device),
        tokens=tokens[None].to(process.device),
        predicted=predicted.to(process.device),
        targets=targets.to(process.device),
        cu_seqlens=bounds,
        split=split,
        scored=None if scored is None else scored.to(process.device),
    )


def _last_places(batch: PackedBatch, place: Tensor) -> Tensor:
    """[N] place of the last token of each sequence, by its length; -1 for one without tokens."""
    last = torch.full((batch.num_sequences,), -1)
    has_tokens = batch.lengths > 0
    last[has_tokens] = place[batch.cu_seqlens[1:][has_tokens] - 1]
    return last


def _lay_out(batch: PackedBatch, packed: bool) -> tuple[Tensor, Tensor]:
    """Place of each token, and the boundaries of the sequences."""
    if packed or batch.num_sequences == 0:
        return torch.arange(batch.num_tokens), batch.cu_seqlens
    width = int(batch.lengths.max())
    place = batch.segment_ids * width + batch.position_ids
    return place, torch.arange(batch.num_sequences + 1) * width
