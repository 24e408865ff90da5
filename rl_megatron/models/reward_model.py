"""A Megatron GPT with a scalar head: the reward of a sequence, from its last hidden state."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from rl_megatron.kernels.linear_logprob import TokenGradient
from rl_megatron.models.gpt_model import HiddenStatesModel
from rl_megatron.models.sequence import SequenceContext
from rl_megatron.parallel.process import Process


class ScalarHead(torch.nn.Module):
    """hidden . weight in float32, for the rows that are asked; the same on every tensor rank.

    With sequence parallelism a rank sees only its part of the rows, so the weight is marked for
    Megatron to sum its gradient over the tensor group, as those of norms are.
    """

    def __init__(self, hidden_size: int, process: Process, dtype: torch.dtype) -> None:
        super().__init__()
        self._process = process
        # Weights come from a checkpoint, or from `fresh_head`.
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self.weight.sequence_parallel = (  # type: ignore[attr-defined]
            process.layout.sequence_parallel
        )

    def forward(self, hidden: Tensor, asked: Tensor) -> Tensor:
        """[T] float32 from hidden [T or this rank's part, H]; 0 where `asked` [T] is False."""
        sequence_parallel = self._process.layout.sequence_parallel
        if sequence_parallel:
            asked = asked.chunk(self._process.layout.tensor)[self._process.tensor_rank]
        rows = torch.nonzero(asked)[:, 0]
        scores = hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
        scores = scores.index_copy(0, rows, hidden[rows].float() @ self.weight[0].float())
        if sequence_parallel:
            # Every rank goes on alike, so each takes back the gradient of its own rows only.
            scores = gather_from_sequence_parallel_region(
                scores, tensor_parallel_output_grad=False, group=self._process.tensor_group
            )
        return scores


class RewardModel(HiddenStatesModel):
    """One pipeline chunk of a GPT with a scalar head in place of the one over the vocabulary.

    On the last stage `forward` returns [1, T]: the score of each row that has a target, else 0.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(share_embeddings_and_output_weights=False, **kwargs)
        if self.post_process:
            self.output_layer = ScalarHead(
                self.shape.hidden_size, self.process, self.config.params_dtype
            )

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        context: SequenceContext,
        targets: Tensor,
        token_gradient: TokenGradient | None = None,
    ) -> Tensor:
        """See the class; `tokens` [1, T], `targets` [T] (-1 skips a row)."""
        assert token_gradient is None, "only a head over the vocabulary has one"
        hidden = self.hidden_states(tokens, context)
        if not self.post_process:
            return hidden
        return self.output_layer(hidden[:, 0], targets >= 0)[None]

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As Megatron's, which would read any head of another number of rows as a padded one."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, *args, **kwargs)
        if self.post_process:
            state[f"{prefix}output_layer.weight"].allow_shape_mismatch = False
        return state
