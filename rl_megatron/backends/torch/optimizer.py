"""AdamW as Megatron does it: float32 throughout, whatever the model's dtype is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rl_megatron.config.optimizer import OptimizerConfig


class MainWeightAdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) on float32 main copies of the parameters.

    A float32 parameter is its own main copy. Biases and norms have no weight decay.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], settings: OptimizerConfig) -> None:
        self._parameters = list(parameters)
        self._clip_grad = settings.clip_grad
        self.main_weights = [
            nn.Parameter(p.detach().float()) if p.dtype == torch.bfloat16 else p
            for p in self._parameters
        ]
        self._adam = torch.optim.AdamW(
            [
                {"params": [w for w in self.main_weights if w.dim() > 1]},
                {"params": [w for w in self.main_weights if w.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
            weight_decay=settings.weight_decay,
        )

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter, main in zip(self._parameters, self.main_weights, strict=True):
            parameter.grad = main.grad = None

    def collect_gradients(self) -> None:
        """Add the gradients of a micro-batch to those of the main weights, in float32."""
        for parameter, main in zip(self._parameters, self.main_weights, strict=True):
            if main is parameter or parameter.grad is None:
                continue
            share = parameter.grad.float()
            main.grad = share if main.grad is None else main.grad.add_(share)
            parameter.grad = None

    def gradient_norm(self) -> float:
        """L2 norm over all parameters, before clipping."""
        return float(torch.nn.utils.get_total_norm(self._gradients()))

    def step(self, lr: float, norm: float) -> None:
        """Clip by the given norm, update the main weights, and round them into the parameters."""
        if self._clip_grad > 0:
            coefficient = self._clip_grad / (norm + 1e-6)
            if coefficient < 1:
                torch._foreach_mul_(self._gradients(), coefficient)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self.round_weights()

    @torch.no_grad()
    def round_weights(self) -> None:
        """Make the parameters what the main weights are in the model's dtype."""
        for parameter, main in zip(self._parameters, self.main_weights, strict=True):
            if main is not parameter:
                parameter.copy_(main)

    def state(self) -> dict[int, Any]:
        """Adam's moments and step count by number of the parameter; no settings."""
        state: dict[int, Any] = self._adam.state_dict()["state"]
        return state

    def load_state(self, state: dict[int, Any]) -> None:
        """Take what `state` gave; settings stay those of this run."""
        groups = self._adam.state_dict()["param_groups"]
        self._adam.load_state_dict({"state": state, "param_groups": groups})

    def tensors(self) -> list[Tensor]:
        """Main weights, their gradients, and moments: what lies beside the model on its device."""
        moments = [
            state[name] for state in self._adam.state.values() for name in ("exp_avg", "exp_avg_sq")
        ]
        return [*self.main_weights, *self._gradients(), *moments]

    def _gradients(self) -> list[Tensor]:
        return [main.grad for main in self.main_weights if main.grad is not None]
