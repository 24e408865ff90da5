"""The records of one sampled response: what was asked, what came back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One row of prompt data, tokenized once; engines and trainer both use `token_ids`.

    Attributes:
        row_id: Identity of the row in its data set. Groups are formed by it, never by text.
        token_ids: The prompt as the model sees it, special tokens included.
        text: The rendered prompt (with the chat template's own text), for rewards and logs.
        answer: The known correct answer that a reward compares with, if there is one.
        extra: Any further fields of the row, passed on to rewards untouched.
    """

    row_id: int
    token_ids: tuple[int, ...]
    text: str
    answer: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. Nothing is ever filled in from the model folder's own defaults.

    Attributes:
        temperature: Logits are divided by it; 0 means greedy (evaluation only).
        top_p: Nucleus mass kept, 1.0 = all.
        top_k: Tokens kept, 0 = all.
        min_p: Tokens below min_p * max probability are dropped, 0.0 = none.
        max_response_tokens: A response is cut after this many tokens (finish_reason "length").
        min_response_tokens: Stop tokens are forbidden before this many tokens were sampled.
        stop_token_ids: Tokens that end a response; the stop token is part of the response.
    """

    temperature: float
    max_response_tokens: int
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_response_tokens: int = 0


@dataclass(frozen=True)
class Rollout:
    """One sampled response.

    Attributes:
        prompt: What was asked.
        sample_index: 0 .. group_size - 1 within the prompt's group.
        response_ids: Sampled tokens, the stop token included when finish_reason is "stop".
        rollout_logprobs: One per response token, under the distribution it was sampled from.
        finish_reason: "stop" (a stop token was sampled) or "length" (cut).
        text: The response decoded without special tokens of the tokenizer.
        policy_version: Optimiser steps taken by the weights that sampled it.
    """

    prompt: Prompt
    sample_index: int
    response_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    text: str
    policy_version: int
