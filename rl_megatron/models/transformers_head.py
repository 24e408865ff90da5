"""The heads of a transformers model, as modules without parameters of their own.

The head's weight belongs to the model, often as its embedding too. ZeRO-3 keeps a parameter empty
but while a module that owns or borrows it is at work, so what uses one is a module that says so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rl_megatron.kernels.linear_logprob import TokenGradient, linear_logprob

# What a config calls the factor of all logits, and the sign of its exponent.
_SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}


def trunk(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that ends in what its head reads."""
    base: PreTrainedModel = model.base_model
    # Llama4ForCausalLM misnames it.
    return model.model if base is model else base


class LogprobHead(nn.Module):
    """Log-probs and entropy from hidden states, by the weights of the model's own head.

    Args:
        model: A language model.
        temperature: Logits are divided by it.
        kernels: Implementation of `linear_logprob`.
    """

    def __init__(
        self, model: PreTrainedModel, temperature: float = 1.0, kernels: str = "auto"
    ) -> None:
        super().__init__()
        # A method and not the module it gives, which would be registered here a second time.
        self._owner: Callable[[], nn.Linear] = model.get_output_embeddings
        self._kernels = kernels
        config = model.config.get_text_config()
        self._scale = _logit_scale(config)
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.temperature = temperature

    @property
    def weight(self) -> nn.Parameter:
        """The model's own, [vocabulary, H]."""
        return self._owner().weight

    @property
    def borrowed(self) -> list[nn.Parameter]:
        """All parameters of the model that are used here."""
        bias = getattr(self._owner(), "bias", None)
        return [self.weight] if bias is None else [self.weight, bias]

    def forward(
        self, rows: Tensor, targets: Tensor, gradient: TokenGradient | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy [n] of `targets` [n] after hidden states [n, H]; -1 is left out."""
        weight, *bias = self.borrowed
        if bias:
            rows, weight = _with_bias(rows, weight, bias[0])
        return linear_logprob(
            rows,
            weight,
            targets,
            self.temperature / self._scale,
            weight.shape[0],
            softcap=self._softcap,
            implementation=self._kernels,
            token_gradient=gradient,
        )

    def logits(self) -> Callable[[Tensor], Tensor]:
        """What gives float32 logits [n, vocabulary] from hidden states [n, H], at temperature 1.

        The weights are those of now.
        """
        weight, *bias = (parameter.detach().float() for parameter in self.borrowed)

        def compute(hidden: Tensor) -> Tensor:
            found = nn.functional.linear(hidden.float(), weight, *bias)
            if self._softcap is not None:
                found = self._softcap * torch.tanh(found / self._softcap)
            return self._scale * found

        return compute


class ScoreHead(nn.Module):
    """Scores from hidden states in float32, by the weight of a reward model's own head."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self._owner: Callable[[], nn.Linear] = lambda: model.score

    @property
    def weight(self) -> nn.Parameter:
        """The model's own, [1, H]."""
        return self._owner().weight

    @property
    def borrowed(self) -> list[nn.Parameter]:
        """All parameters of the model that are used here."""
        return [self.weight]

    def forward(self, rows: Tensor) -> tuple[Tensor]:
        """[n] from hidden states [n, H]."""
        return (rows.float() @ self.weight[0].float(),)


def _with_bias(rows: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and weight whose products are the logits, bias included."""
    return nn.functional.pad(rows, (0, 1), value=1.0), torch.cat([weight, bias[:, None]], dim=1)


def _logit_scale(config: PreTrainedConfig) -> float:
    scale = 1.0
    for name, sign in _SCALES.items():
        scale *= float(getattr(config, name, None) or 1.0) ** sign
    return scale
