"""The packed batch: sequences laid end to end, the native form of everything that is trained.

The whole mini-batch lives in host memory on every rank; a device only ever sees the micro-batch
at work. So global denominators are sums over local tensors, the order of data cannot depend on
how ranks are laid out, and a backend may deal sequences to data-parallel ranks as it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_TOKEN_FIELDS = (
    "response_mask",
    "loss_weights",
    "advantages",
    "old_logprobs",
    "rollout_logprobs",
    "ref_logprobs",
)
_SEQUENCE_FIELDS = ("margins", "desirable")


@dataclass(frozen=True)
class PackedBatch:
    """N sequences of T tokens in all, end to end.

    Per-token values at t belong to the token tokens[t]: logprobs[t] is the log-prob of tokens[t]
    given the tokens before it in its own sequence. The first token of a sequence has none.

    Attributes:
        tokens: Token ids.
        cu_seqlens: Boundaries: sequence i is tokens[cu_seqlens[i]:cu_seqlens[i + 1]].
        response_mask: True on tokens that are trained on. Never True on a first token.
        sequence_ids: Identity of each sequence; unique within the batch.
        paired: True where sequences 2i and 2i + 1 are chosen and rejected of one pair.
        loss_weights: Mask times aggregation weight over the whole mini-batch (losses/aggregate.py);
            the loss of a mini-batch is the sum of loss_weights * per-token loss.
        advantages, old_logprobs, rollout_logprobs, ref_logprobs: See DESIGN words in
            rl_megatron/README.md; None where the algorithm has no use for them.
        margins: By how much the reward of chosen is to exceed that of rejected, the same on both
            sequences of a pair; None: by nothing.
        desirable: KTO's verdict on each response; None elsewhere.

    Example:
        Two sequences [5, 6, 7] and [8, 9]; the responses are [7] and [9]:
        tokens [5, 6, 7, 8, 9], cu_seqlens [0, 3, 5], response_mask [0, 0, 1, 0, 1].
    """

    tokens: Int[Tensor, " T"]
    cu_seqlens: Int[Tensor, " N_plus_1"]
    response_mask: Bool[Tensor, " T"]
    sequence_ids: Int[Tensor, " N"]
    paired: bool = False
    loss_weights: Float[Tensor, " T"] | None = None
    advantages: Float[Tensor, " T"] | None = None
    old_logprobs: Float[Tensor, " T"] | None = None
    rollout_logprobs: Float[Tensor, " T"] | None = None
    ref_logprobs: Float[Tensor, " T"] | None = None
    margins: Float[Tensor, " N"] | None = None
    desirable: Bool[Tensor, " N"] | None = None

    def __post_init__(self) -> None:
        num_tokens = self.tokens.shape[0]
        assert int(self.cu_seqlens[0]) == 0 and int(self.cu_seqlens[-1]) == num_tokens
        assert self.sequence_ids.shape[0] == self.num_sequences
        for name in _TOKEN_FIELDS:
            value = getattr(self, name)
            assert value is None or value.shape == (num_tokens,), f"{name} must be [{num_tokens}]"
        for name in _SEQUENCE_FIELDS:
            value = getattr(self, name)
            assert value is None or value.shape == self.sequence_ids.shape, f"{name} must be [N]"

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.shape[0]

    @property
    def num_sequences(self) -> int:
        """N."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def lengths(self) -> Int[Tensor, " N"]:
        """Tokens of each sequence."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    @property
    def position_ids(self) -> Int[Tensor, " T"]:
        """Position of each token in its own sequence."""
        starts = torch.repeat_interleave(self.cu_seqlens[:-1], self.lengths)
        return torch.arange(self.num_tokens, device=starts.device) - starts

    @property
    def segment_ids(self) -> Int[Tensor, " T"]:
        """Index of the sequence that each token belongs to."""
        index = torch.arange(self.num_sequences, device=self.cu_seqlens.device)
        return torch.repeat_interleave(index, self.lengths)

    def token_index(self, sequences: Sequence[int]) -> Int[Tensor, " T_selected"]:
        """Where in this batch the tokens of the given sequences are, in the order given."""
        bounds = self.cu_seqlens.tolist()
        spans = [torch.arange(bounds[i], bounds[i + 1]) for i in sequences]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)

    def select(self, sequences: Sequence[int]) -> PackedBatch:
        """The batch of the given sequences (indices into this batch), in the order given."""
        index = self.token_index(sequences)
        chosen = torch.tensor(list(sequences), dtype=torch.int64)
        bounds = torch.zeros(len(sequences) + 1, dtype=self.cu_seqlens.dtype)
        bounds[1:] = torch.cumsum(self.lengths[chosen], 0)
        return replace(
            self,
            cu_seqlens=bounds,
            sequence_ids=self.sequence_ids[chosen],
            **self._per_token(index),
            **self._per_sequence(chosen),
        )

    def at_tokens(self, index: Int[Tensor, " n"]) -> PackedBatch:
        """The tokens at `index` as one sequence, for what looks at single tokens only."""
        return replace(
            self,
            cu_seqlens=torch.tensor([0, index.shape[0]], device=index.device),
            sequence_ids=torch.zeros(1, dtype=torch.int64, device=index.device),
            paired=False,
            margins=None,
            desirable=None,
            **self._per_token(index),
        )

    def with_fields(self, **values: Any) -> PackedBatch:
        """The same batch with some fields set, e.g. `with_fields(old_logprobs=...)`."""
        return replace(self, **values)

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch with every tensor on `device`."""
        moved: dict[str, Any] = {
            f.name: value.to(device)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)

    def _per_token(self, index: Tensor) -> dict[str, Any]:
        values = {"tokens": self.tokens} | {name: getattr(self, name) for name in _TOKEN_FIELDS}
        return {n: None if value is None else value[index] for n, value in values.items()}

    def _per_sequence(self, index: Tensor) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _SEQUENCE_FIELDS}
        return {n: None if value is None else value[index] for n, value in values.items()}


@dataclass(frozen=True)
class JudgedBatch:
    """What KTO sees of a mini-batch.

    Attributes:
        rows: Responses with their verdicts.
        mismatched: The same prompts, each with a response to another prompt; None where no KL is
            measured.
    """

    rows: PackedBatch
    mismatched: PackedBatch | None = None

    @property
    def parts(self) -> list[PackedBatch]:
        """Everything that a reference is asked about."""
        return [self.rows] if self.mismatched is None else [self.rows, self.mismatched]
