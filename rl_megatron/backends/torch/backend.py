"""`TorchBackend`: the whole model in one process, without Megatron.

It shares with the other backends what makes the numbers (the objective, the weights of tokens, the
micro-batch plan, log-probs from hidden states), and nothing of how a model is run.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_megatron.backends.offload import Offloaded
from rl_megatron.backends.torch.optimizer import MainWeightAdamW
from rl_megatron.backends.transformers_backend import TransformersBackend
from rl_megatron.checkpoint.hf_files import SINGLE_FILE, HFWeights
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.data.packing import MicroBatching
from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.objective import Objective
from rl_megatron.interfaces.protocols import PendingSave
from rl_megatron.kernels.linear_logprob import TokenGradient
from rl_megatron.models.self_check import check_policy
from rl_megatron.models.transformers_model import (
    file_weights,
    load_transformers_model,
    named_weights,
    set_weights,
)
from rl_megatron.models.transformers_policy import TransformersPolicy
from rl_megatron.parallel.process import Process

_OPTIMIZER_FILE = "optimizer.pt"


class TorchBackend(TransformersBackend):
    """The `PolicyBackend` and `RewardBackend` protocols on a transformers model.

    Args:
        folder: Hugging Face folder, of a language model or of a reward model.
        process: This process, alone in its job.
        micro_batching: How sequences are put together for one forward pass.
        temperature: Logits are divided by it.
        dtype: Of weights and activations.
        optimizer: Adam's settings; None for a frozen model.
        head_kernels: Implementation of `linear_logprob`.
        one_pass: Compute the gradient of the head in the forward pass, where the loss allows it.
        head: A scalar head [1, H] in place of the folder's own, which makes it a reward model.
        recompute: As `model.recompute`.
    """

    def __init__(
        self,
        folder: Path,
        process: Process,
        micro_batching: MicroBatching,
        temperature: float = 1.0,
        dtype: torch.dtype = torch.float32,
        optimizer: OptimizerConfig | None = None,
        head_kernels: str = "auto",
        one_pass: bool = False,
        head: Tensor | None = None,
        recompute: str = "none",
    ) -> None:
        assert process.layout.world_size == 1, "the torch backend is one process"
        self.model = load_transformers_model(folder, dtype, process.device, head)
        self.model.requires_grad_(optimizer is not None)
        policy = TransformersPolicy(self.model, temperature, head_kernels)
        if recompute == "full":
            policy.recompute_layers()
        check_policy(policy, micro_batching.packed, process.device)
        super().__init__(policy, process, micro_batching, one_pass)
        self._offloaded = Offloaded()
        self._optimizer: MainWeightAdamW | None = None
        if optimizer is not None:
            self._optimizer = MainWeightAdamW(self.model.parameters(), optimizer)

    def train_step(self, batch: PackedBatch, objective: Objective, lr: float) -> dict[str, float]:
        """One optimiser step; its gradients stay until the next one. See `PolicyBackend`."""
        self._trained.zero_grad()
        return super().train_step(batch, objective, lr)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name; the live ones."""
        return named_weights(self.model)

    def save(self, folder: Path, *, background: bool = False) -> PendingSave:
        """Write weights (the float32 main ones of a bf16 model) and the state of Adam, at once."""
        del background  # A small model.
        weights = dict(self.named_weights())
        if self._optimizer is not None:
            weights |= dict(self._named_main_weights())
            torch.save(self._optimizer.state(), folder / _OPTIMIZER_FILE)
        on_host = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
        save_file(on_host, folder / SINGLE_FILE, metadata={"format": "pt"})
        return _Saved()

    def load(self, folder: Path) -> None:
        """Read what `save` wrote. A frozen model reads the weights only."""
        whole = (slice(None),)
        with HFWeights(folder) as files:
            set_weights(self.model, ((n, files.read(n, whole)) for n in sorted(files.names)))
            if self._optimizer is None:
                return
            for name, main in self._named_main_weights():
                main.copy_(files.read(name, whole))
        self._optimizer.load_state(_read_optimizer(folder / _OPTIMIZER_FILE))

    def offload(self) -> None:
        """Move weights and optimizer state to host memory; nothing to do on a CPU."""
        if self.process.device.type != "cpu":
            self._offloaded.take([*self.model.parameters(), *self._optimizer_tensors()])

    def onload(self) -> None:
        """Undo `offload`."""
        self._offloaded.restore()

    def close(self) -> None:
        """Drop model and optimizer."""
        del self.model, self.module
        self._optimizer = None

    def _run(self, batch: PackedBatch, gradient: TokenGradient | None) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = self.module(batch, self.micro_batching.packed, gradient)
        return result

    def _named_main_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every trained weight under its name in files; the live float32 ones."""
        assert self._optimizer is not None
        names = [name for name, _ in self.model.named_parameters()]
        for name, main in zip(names, self._optimizer.main_weights, strict=True):
            yield from file_weights(self.model, name, main.detach())

    def _backward(self, loss: Tensor, is_last: bool) -> None:
        del is_last
        loss.backward()
        self._trained.collect_gradients()

    def _gradient_norm(self) -> float:
        return self._trained.gradient_norm()

    def _drop_gradients(self) -> None:
        self._trained.zero_grad()

    def _update(self, lr: float, norm: float) -> None:
        self._trained.step(lr, norm)

    @property
    def _trained(self) -> MainWeightAdamW:
        assert self._optimizer is not None, "a frozen model has no optimizer"
        return self._optimizer

    def _optimizer_tensors(self) -> list[Tensor]:
        return [] if self._optimizer is None else self._optimizer.tensors()


class _Saved:
    """A save with nothing left to do; see `PendingSave`."""

    def is_done(self) -> bool:
        """It is."""
        return True

    def finish(self) -> None:
        """Nothing to wait for."""


def _read_optimizer(path: Path) -> dict[int, object]:
    """Adam's state; CheckpointError naming the file if it is missing or broken."""
    try:
        state: dict[int, object] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). Resume from another checkpoint."
        ) from error
    return state
