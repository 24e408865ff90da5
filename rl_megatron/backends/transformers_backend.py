"""How a transformers model is scored and stepped, however its training state is held."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_megatron.backends.reduce import (
    check_finite,
    counts_nothing,
    reduce_metrics,
    step_metrics,
)
from rl_megatron.backends.token_gradient import token_gradient
from rl_megatron.data.packing import MicroBatching, plan_micro_batches
from rl_megatron.errors import NumericsError
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.metric_names import LOSS_TOTAL
from rl_megatron.interfaces.objective import ModelOutput, Objective
from rl_megatron.kernels.linear_logprob import TokenGradient
from rl_megatron.losses.aggregate import totals
from rl_megatron.metrics.trace import trace
from rl_megatron.models.transformers_head import ScoreHead
from rl_megatron.models.transformers_policy import TransformersPolicy
from rl_megatron.parallel import watchdog
from rl_megatron.parallel.process import Process


class TransformersBackend(ABC):
    """What backends of transformers models share. All ranks are data-parallel.

    Args:
        module: The model with its head.
        process: This rank.
        micro_batching: How sequences are put together for one forward pass.
        one_pass: Compute the gradient of the head in the forward pass, where the loss allows it.
        loss_factor: What the loss is multiplied by before its backward pass.
    """

    def __init__(
        self,
        module: TransformersPolicy,
        process: Process,
        micro_batching: MicroBatching,
        one_pass: bool = False,
        loss_factor: float = 1.0,
    ) -> None:
        self.module = module
        self.process = process
        self.micro_batching = micro_batching
        self._one_pass = one_pass
        self._loss_factor = loss_factor

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """Log-prob of every response token of the whole batch; see `PolicyBackend`."""
        result = torch.zeros(batch.num_tokens, dtype=torch.float32)
        for members, output in self._outputs(batch):
            result[batch.token_index(members)] = output.logprobs.float().cpu()
        return self.process.all_reduce(result)

    def scores(self, batch: PackedBatch) -> Tensor:
        """The reward of every sequence of the whole batch; see `RewardScorer`."""
        result = torch.zeros(batch.num_sequences, dtype=torch.float32)
        for members, output in self._outputs(batch):
            assert output.scores is not None, "a policy has no scores"
            result[members] = output.scores.float().cpu()
        return self.process.all_reduce(result)

    def train_step(self, batch: PackedBatch, objective: Objective, lr: float) -> dict[str, float]:
        """One optimiser step on the whole mini-batch; see `PolicyBackend`."""
        batch = objective.weigh(batch)
        counts = totals(batch)
        trace("mini-batch", "the whole mini-batch, on the host", batch=batch, totals=counts)
        outputs = []
        micro_batches = self._micro_batches(batch)
        for number, (_, micro_batch) in enumerate(micro_batches, start=1):
            gradient = None
            if self._one_pass and objective.token_local:
                predicted = torch.arange(1, micro_batch.num_tokens, device=self.process.device)
                gradient = token_gradient(
                    objective, micro_batch, counts, predicted, self._loss_factor
                )
            output = objective.loss(self._output(micro_batch, gradient), micro_batch, counts)
            self._backward(self._loss_factor * output.loss, is_last=number == len(micro_batches))
            shares = {LOSS_TOTAL: output.loss.detach(), **output.metrics}
            outputs.append({"shares": shares, "maxima": output.maxima})
        metrics = reduce_metrics(self.process, outputs)
        norm = self._gradient_norm()
        skip = counts_nothing(batch)
        try:
            check_finite(metrics, norm)
        except NumericsError:
            self._drop_gradients()
            raise
        if skip:
            self._drop_gradients()
        else:
            self._update(lr, norm)
        return metrics | step_metrics(norm, lr, skip)

    def model_to_sample_from(self) -> tuple[PreTrainedModel, bool]:
        """A model that an engine can sample from, and whether it is another one, without weights
        yet; see `HFEngine`."""
        return self.module.model, False

    @abstractmethod
    def offload(self) -> None:
        """Move everything to host memory; see `TrainedModel`."""

    @abstractmethod
    def onload(self) -> None:
        """Undo `offload`."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held."""

    @abstractmethod
    def _run(self, batch: PackedBatch, gradient: TokenGradient | None) -> tuple[Tensor, ...]:
        """The module's forward pass on a micro-batch."""

    @abstractmethod
    def _backward(self, loss: Tensor, is_last: bool) -> None:
        """Add the gradient of a micro-batch; after the last one those of all ranks."""

    @abstractmethod
    def _gradient_norm(self) -> float:
        """L2 norm over all parameters, before clipping."""

    @abstractmethod
    def _drop_gradients(self) -> None:
        """Forget the gradients."""

    @abstractmethod
    def _update(self, lr: float, norm: float) -> None:
        """Clip the gradients, whose norm is given, update the weights, and forget them."""

    def _outputs(self, batch: PackedBatch) -> Iterator[tuple[list[int], ModelOutput]]:
        """Sequences of this rank, and what the model says of them."""
        for members, micro_batch in self._micro_batches(batch):
            # Not inference mode: its tensors may not take part in training, and ZeRO keeps some.
            with torch.no_grad():
                yield members, self._output(micro_batch)

    def _output(self, batch: PackedBatch, gradient: TokenGradient | None = None) -> ModelOutput:
        watchdog.beat()
        values = self._run(batch, gradient)
        if isinstance(self.module.head, ScoreHead):
            return ModelOutput.of_scores(values[0])
        return ModelOutput(*values)

    def _micro_batches(self, batch: PackedBatch) -> list[tuple[list[int], PackedBatch]]:
        """This rank's micro-batches on its device, and which sequences of `batch` they hold.

        All ranks have the same number of them, some may be empty.
        """
        ranks = self.process.layout.data
        plan = plan_micro_batches(batch.lengths.tolist(), batch.paired, ranks, self.micro_batching)
        return [
            (members, batch.select(members).to(self.process.device))
            for members in plan[self.process.data_rank]
        ]


class WaitingReference:
    """A frozen model that waits in host memory while it is not needed; see `Scorer`."""

    def __init__(self, model: TransformersBackend) -> None:
        self._model = model
        model.offload()

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """Log-prob of every response token; see `Scorer`."""
        self._model.onload()
        try:
            return self._model.logprobs(batch)
        finally:
            self._model.offload()

    def close(self) -> None:
        """Drop the model."""
        self._model.close()
