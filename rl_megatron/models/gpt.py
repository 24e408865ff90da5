"""A Megatron GPT built from a `ModelShape`: hidden states in, log-probs out, never logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_megatron.kernels.linear_logprob import TokenGradient, linear_logprob
from rl_megatron.models.balance import follow_balance, prepare_scale
from rl_megatron.models.gpt_model import HiddenStatesModel, block_spec, transformer_config
from rl_megatron.models.reward_model import RewardModel
from rl_megatron.models.sequence import SequenceContext
from rl_megatron.models.shape import ModelShape
from rl_megatron.models.split import padded_vocab_size
from rl_megatron.parallel.process import Process


class PolicyModel(HiddenStatesModel):
    """One pipeline chunk of a GPT with a head over the vocabulary.

    On the last stage `forward` returns [2, T]: log-prob of each target and entropy. With
    `targets=None` it returns the hidden states [T, 1, H], and elsewhere always does.
    """

    def __init__(
        self,
        shape: ModelShape,
        process: Process,
        temperature: float,
        head_kernels: str,
        **kwargs: Any,
    ):
        super().__init__(
            shape,
            process,
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
            **kwargs,
        )
        self.temperature = temperature
        self.head_kernels = head_kernels

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        context: SequenceContext,
        targets: Tensor | None = None,
        token_gradient: TokenGradient | None = None,
    ) -> Tensor:
        """See the class; `tokens` [1, T], `targets` [T] (-1 skips a row).

        With `token_gradient` the head's gradient is computed in this pass; see `linear_logprob`.
        """
        hidden = self.hidden_states(tokens, context)
        if not self.post_process or targets is None:
            return hidden
        return torch.stack(
            linear_logprob(
                hidden[:, 0],
                self.head_weight(),
                targets,
                self.temperature,
                self.shape.vocab_size,
                self.process.tensor_group,
                self.config.sequence_parallel,
                implementation=self.head_kernels,
                token_gradient=token_gradient,
            )
        )

    def head_weight(self) -> Tensor:
        """This rank's rows of the head [V_local, H]; the embedding's where they are tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def build_model(
    shape: ModelShape,
    process: Process,
    dtype: torch.dtype,
    vocab_divisor: int,
    temperature: float = 1.0,
    recompute: str = "none",
    head_kernels: str = "auto",
) -> list[PolicyModel] | list[RewardModel]:
    """The chunks of this rank's pipeline stage, weights not yet set.

    With a scalar head they are those of a reward model, which reads neither `temperature` nor
    `head_kernels`.
    """
    layout = process.layout
    config = transformer_config(shape, process, dtype, recompute)
    make: Callable[..., Any] = RewardModel
    if not shape.scalar_head:
        make = partial(PolicyModel, temperature=temperature, head_kernels=head_kernels)
    chunks = []
    for chunk in range(layout.virtual):
        vp_stage = chunk if layout.virtual > 1 else None
        model = make(
            shape=shape,
            process=process,
            config=config,
            transformer_layer_spec=block_spec(shape, config, vp_stage),
            vocab_size=padded_vocab_size(shape.vocab_size, vocab_divisor, layout.tensor),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=process.stage == 0 and chunk == 0,
            post_process=process.is_last_stage and chunk == layout.virtual - 1,
            vp_stage=vp_stage,
        )
        chunks.append(model.to(device=process.device, dtype=dtype))
        if shape.experts is not None:
            _mark_experts(chunks[-1])
            prepare_scale(process.device)
            for layer in model.decoder.layers:
                follow_balance(layer)
    return chunks


def _mark_experts(model: torch.nn.Module) -> None:
    """Give experts an optimizer of their own, as Megatron does where several ranks share them.

    Done where one rank has them all, too, optimizer states have one form and are read under any
    number of ranks.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
