"""What a model says, the naive way: transformers, one sequence at a time, all logits, float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rl_megatron.interfaces.batch import PackedBatch


@cache
def oracle_model(folder: Path) -> Any:
    """The model of a folder in float64; shared, so never to be changed."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, local_files_only=True)
    model.set_experts_implementation("eager")  # The default of experts has no float64.
    return model.eval()


@cache
def oracle_reward_model(folder: Path) -> Any:
    """The reward model of a folder in float64; shared, so never to be changed."""
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float64, local_files_only=True
    )
    return model.eval()


def batch_scores(model: Any, batch: PackedBatch) -> Tensor:
    """[N] score of each sequence, read by transformers; differentiable."""
    sequences = batch.tokens.split(batch.lengths.tolist())
    # Alone, without padding: transformers takes the last column where no token is padding.
    model.config.pad_token_id = None
    return torch.cat([model(tokens[None]).logits[0] for tokens in sequences])


def next_token_logprobs(model: Any, tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
    """[T, V]: row t is the distribution of the token after tokens[: t + 1]; differentiable."""
    logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return (logits / (temperature or 1.0)).log_softmax(dim=1)


def batch_logprobs(model: Any, batch: PackedBatch, temperature: float = 1.0) -> Tensor:
    """[T] log-prob of each response token, 0 elsewhere; differentiable."""
    values = []
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        rows = next_token_logprobs(model, tokens.tolist(), temperature)[:-1]
        picked = rows.gather(1, tokens[1:, None])[:, 0]
        values.append(torch.nn.functional.pad(picked, (1, 0)))
    return torch.where(batch.response_mask, torch.cat(values), 0.0)
