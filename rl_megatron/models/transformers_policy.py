"""A transformers model with its head as one module, and how its layers are recomputed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rl_megatron.errors import ConfigError
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.kernels.linear_logprob import TokenGradient
from rl_megatron.models.packed_attention import attend_by_sequence, packed_sequences
from rl_megatron.models.transformers_head import LogprobHead, ScoreHead, trunk


class TransformersPolicy(nn.Module):
    """A transformers model, and what is asked of its last hidden states: log-probs and entropy of
    response tokens, or the scores of sequences.

    Never in training mode: with dropout no ratio would be 1.

    Args:
        model: A language model, or a reward model.
        temperature: Logits are divided by it.
        head_kernels: Implementation of `linear_logprob`.
    """

    def __init__(
        self, model: PreTrainedModel, temperature: float = 1.0, head_kernels: str = "auto"
    ) -> None:
        super().__init__()
        self.model = model
        attend_by_sequence(model)
        arguments = inspect.signature(trunk(model).forward).parameters
        self._takes_positions = "position_ids" in arguments
        is_language_model = model.get_output_embeddings() is not None
        self.head: LogprobHead | ScoreHead = (
            LogprobHead(model, temperature, head_kernels) if is_language_model else ScoreHead(model)
        )
        self.eval()

    def forward(
        self,
        batch: PackedBatch,
        packed: bool = False,
        gradient: TokenGradient | None = None,
    ) -> tuple[Tensor, ...]:
        """(log-prob [T], entropy [T]), 0 but on response tokens; of a reward model (scores [N],).

        Whatever the batch holds, even nothing, every parameter is part of the result: its gradient
        may be 0, and all ranks make the same collectives.

        Args:
            batch: A micro-batch, on the model's device.
            packed: Sequences go through the model end to end; otherwise each is padded to the
                longest.
            gradient: The gradient of the loss, see `linear_logprob`.
        """
        rows = self._hidden_states(batch, packed)
        if isinstance(self.head, ScoreHead):
            return (self._scores(self.head, rows, batch),)
        # Row t speaks about token t + 1: the last row of a sequence about nothing.
        targets = torch.where(batch.response_mask, batch.tokens, -1)[1:]
        targets = nn.functional.pad(targets, (0, len(rows) - len(targets)), value=-1)
        logprobs, entropy = self.head(rows, targets, gradient)
        return logprobs.roll(1)[: batch.num_tokens], entropy.roll(1)[: batch.num_tokens]

    def recompute_layers(self) -> None:
        """Keep only the input of each layer, and compute the rest again in the backward pass.

        transformers' own switch is for training mode.

        Raises:
            ConfigError: The model does not say what its layers are.
        """
        layers = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            raise ConfigError(
                "model.recompute = 'full': transformers does not say what the layers of model_type "
                f"{self.model.config.model_type} are; set it to none"
            )
        for layer in layers:
            layer.forward = partial(_recomputed, layer.forward)  # type: ignore[method-assign]

    def _hidden_states(self, batch: PackedBatch, packed: bool) -> Tensor:
        """[T, H] after the last layer; one row of a dummy token, if there is no token."""
        if batch.num_tokens == 0:
            return self._run(batch.tokens.new_zeros(1, 1))[0]
        if packed:
            places = {"position_ids": batch.position_ids[None]} if self._takes_positions else {}
            with packed_sequences(batch.cu_seqlens.unique().tolist()):
                return self._run(batch.tokens[None], **places)[0]
        # Padding stands to the right of every sequence, where causal attention does not look.
        padded = pad_sequence(batch.tokens.split(batch.lengths.tolist()), batch_first=True)
        columns = torch.arange(padded.shape[1], device=padded.device)
        return self._run(padded)[columns < batch.lengths[:, None]]

    def _run(self, tokens: Tensor, **more: Tensor) -> Tensor:
        """Hidden states [n, S, H] of tokens [n, S]."""
        hidden: Tensor = trunk(self.model)(tokens, use_cache=False, **more).last_hidden_state
        return hidden

    def _scores(self, head: ScoreHead, rows: Tensor, batch: PackedBatch) -> Tensor:
        """[N] float32: each sequence's at its last token, 0 without."""
        has_tokens = batch.lengths > 0
        last = (batch.cu_seqlens[1:] - 1)[has_tokens]
        (found,) = head(rows[last])
        return found.new_zeros(batch.num_sequences).masked_scatter(has_tokens, found)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # No random number is drawn, so no generator is put back.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
