"""What a backend is asked to minimise: a loss bound to its numbers, and the shares it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from rl_megatron.interfaces.batch import PackedBatch


@dataclass(frozen=True)
class ModelOutput:
    """What the model says of a micro-batch.

    Attributes:
        logprobs: Log-prob of each token at the run's temperature, 0 on first tokens.
        entropy: Entropy in nats of the distribution each token was drawn from, 0 on first tokens.
        scores: Of a reward model, which has no log-probs (T is 0 then): one number for each
            sequence, read at its last token; 0 for a sequence without tokens. None of a policy.
    """

    logprobs: Float[Tensor, " T"]
    entropy: Float[Tensor, " T"]
    scores: Float[Tensor, " N"] | None = None

    @classmethod
    def of_scores(cls, scores: Float[Tensor, " N"]) -> ModelOutput:
        """What a reward model says."""
        return cls(scores.new_zeros(0), scores.new_zeros(0), scores)


@dataclass(frozen=True)
class Totals:
    """Counts over the whole mini-batch of one optimiser step: the denominators of all metrics.

    Attributes:
        num_tokens: Tokens under the response mask.
        num_sequences: Sequences with at least one such token.
        num_pairs: Pairs of which both sides have at least one such token (0 if not paired).
        num_desirable: Of the sequences, those that are desirable (0 if there are no verdicts).
    """

    num_tokens: int
    num_sequences: int
    num_pairs: int
    num_desirable: int = 0


@dataclass(frozen=True)
class LossOutput:
    """One micro-batch's share of the mini-batch.

    Attributes:
        loss: Scalar; the mini-batch's loss is the sum over micro-batches and data-parallel ranks.
        metrics: Scalars, detached; like the loss, each is a share and the shares add up.
        maxima: Scalars, detached, of which the mini-batch's value is the maximum.
    """

    loss: Float[Tensor, ""]
    metrics: dict[str, Float[Tensor, ""]] = field(default_factory=dict)
    maxima: dict[str, Float[Tensor, ""]] = field(default_factory=dict)


LossFn = Callable[[ModelOutput, PackedBatch, Totals], LossOutput]


@dataclass(frozen=True)
class Objective:
    """A loss bound to its numbers.

    Attributes:
        name: For messages and traces.
        weigh: Sets `loss_weights` from the whole mini-batch, before it is dealt to ranks.
        loss: Share of the loss and metrics of one micro-batch.
        token_local: Whether the loss is a sum over tokens of functions of one token each, so that
            the gradient of any of them is known before the others are.
    """

    name: str
    weigh: Callable[[PackedBatch], PackedBatch]
    loss: LossFn
    token_local: bool = False
