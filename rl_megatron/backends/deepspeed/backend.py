"""A policy or reference under DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from rl_megatron.backends.deepspeed.engine import start_engine
from rl_megatron.backends.deepspeed.scratch import Scratch
from rl_megatron.backends.deepspeed.weights import read_weights, whole_weights
from rl_megatron.backends.deepspeed.zero import adam_step, set_adam_step, zero_state
from rl_megatron.backends.offload import Offloaded
from rl_megatron.backends.transformers_backend import TransformersBackend
from rl_megatron.checkpoint.hf_shards import WrittenShards
from rl_megatron.checkpoint.pieces import PieceFiles, WrittenPieces
from rl_megatron.checkpoint.saving import Saving, save_parts
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.data.packing import MicroBatching
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.protocols import PendingSave
from rl_megatron.kernels.linear_logprob import TokenGradient
from rl_megatron.models.self_check import check_policy
from rl_megatron.models.transformers_bare import bare_copy
from rl_megatron.models.transformers_policy import TransformersPolicy
from rl_megatron.parallel.process import Process

_STEP = "step"


class DeepSpeedBackend(TransformersBackend):
    """The `PolicyBackend` and `RewardBackend` protocols under ZeRO.

    Args:
        policy: The model with its head, weights loaded; under stage 3 best by `load_sharded`.
        process: This rank.
        micro_batching: How sequences are put together for one forward pass.
        settings: DeepSpeed's, from `engine_settings`.
        optimizer: Adam's settings; None for a frozen model.
        one_pass: Compute the gradient of the head in the forward pass, where the loss allows it.
        scratch: The folder that `settings` offload to, if they do; removed by `close`.
    """

    def __init__(
        self,
        policy: TransformersPolicy,
        process: Process,
        micro_batching: MicroBatching,
        settings: dict[str, Any],
        optimizer: OptimizerConfig | None = None,
        one_pass: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        # The loss is a share of the mini-batch's: gradients of micro-batches and ranks add up.
        # DeepSpeed divides them by the number of ranks, which is undone here.
        ranks = process.layout.world_size
        super().__init__(policy, process, micro_batching, one_pass, loss_factor=ranks)
        self._is_sharded = settings["zero_optimization"]["stage"] == 3
        self._engine = start_engine(policy, settings, optimizer)
        check_policy(policy, micro_batching.packed, process.device, self._engine)
        self._state = None if optimizer is None else zero_state(self._engine, process)
        self._offloaded = Offloaded()
        self._saving: Saving | None = None
        self._scratch = scratch

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, whole, on every rank; one at a time."""
        return whole_weights(self.module.model)

    def model_to_sample_from(self) -> tuple[PreTrainedModel, bool]:
        """The live model; under stage 3, whose weights are spread, one to gather them into."""
        if not self._is_sharded:
            return super().model_to_sample_from()
        return bare_copy(self.module.model, self.process.device), True

    def save(self, folder: Path, *, background: bool = False) -> PendingSave:
        """Write a Hugging Face model's weights, and the pieces of Adam's state; see
        `PolicyBackend`."""
        weights = WrittenShards(folder, self.named_weights(), self.process)
        pieces = [] if self._state is None else list(self._state.pieces(is_loading=False))
        step = {_STEP: str(adam_step(self._engine))}
        state = WrittenPieces(folder, self.process, pieces, step)
        self._saving = save_parts(folder, self.process, [state, weights], background=background)
        return self._saving

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, by any number of ranks under any stage. A frozen model reads the
        weights only."""
        self._settle()
        if self._state is None:
            read_weights(self.module.model, folder, self.process)
            return
        with PieceFiles(folder) as files:
            for piece in self._state.pieces(is_loading=True):
                files.fill(piece)
            set_adam_step(self._engine, int(files.metadata[_STEP]))
        self._state.weights_changed()

    def offload(self) -> None:
        """Move weights and optimizer state to host memory; nothing to do on a CPU."""
        self._settle()
        if self.process.device.type != "cpu":
            self._offloaded.take(self._device_tensors())

    def onload(self) -> None:
        """Undo `offload`."""
        self._offloaded.restore()

    def close(self) -> None:
        """Drop model and optimizer."""
        if self._engine is not self.module:
            self._engine.destroy()
        del self._engine, self.module
        self._state = None
        if self._scratch is not None:
            self._scratch.close()

    def _run(self, batch: PackedBatch, gradient: TokenGradient | None) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = self._engine(batch, self.micro_batching.packed, gradient)
        return result

    def _backward(self, loss: Tensor, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss)

    def _gradient_norm(self) -> float:
        assert self._state is not None, "a frozen model has no optimizer"
        return self._state.gradient_norm()

    def _drop_gradients(self) -> None:
        assert self._state is not None, "a frozen model has no optimizer"
        self._state.drop_gradients()

    def _update(self, lr: float, norm: float) -> None:
        del norm  # DeepSpeed clips by its own.
        self._settle()
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()

    def _settle(self) -> None:
        """Let a save that is under way read all of the state, which is about to change."""
        if self._saving is not None:
            self._saving.settle()

    def _device_tensors(self) -> Iterator[Tensor]:
        """Everything this backend keeps on the device."""
        for parameter in self.module.parameters():
            yield parameter
            if hasattr(parameter, "ds_tensor"):
                yield parameter.ds_tensor
        if self._state is not None:
            for piece in self._state.pieces(is_loading=False):
                yield from piece.tensors.values()
