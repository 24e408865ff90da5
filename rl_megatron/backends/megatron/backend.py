"""A policy or reference on Megatron-Core: scored and stepped through Megatron's own schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rl_megatron.backends.megatron.micro_batch import MicroBatch, make_micro_batch
from rl_megatron.backends.megatron.optimizer import (
    apply_settings,
    build_optimizer,
    finalize_gradients,
    wrap_chunks,
)
from rl_megatron.backends.offload import Offloaded
from rl_megatron.backends.reduce import (
    check_finite,
    counts_nothing,
    reduce_metrics,
    step_metrics,
    with_balance,
)
from rl_megatron.backends.token_gradient import token_gradient
from rl_megatron.checkpoint.hf_save import iter_hf_weights
from rl_megatron.checkpoint.megatron import MegatronWeights, load_megatron, make_save_plan
from rl_megatron.checkpoint.megatron_optimizer import load_optimizer, optimizer_pieces
from rl_megatron.checkpoint.saving import Part, Saving, save_parts
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.data.packing import MicroBatching, plan_micro_batches
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.metric_names import LOSS_TOTAL
from rl_megatron.interfaces.objective import ModelOutput, Objective, Totals
from rl_megatron.interfaces.protocols import PendingSave
from rl_megatron.interfaces.weights import WeightRule
from rl_megatron.kernels.linear_logprob import TokenGradient
from rl_megatron.losses.aggregate import totals
from rl_megatron.metrics.trace import trace
from rl_megatron.models.balance import BalanceLoss
from rl_megatron.models.gpt_model import HiddenStatesModel
from rl_megatron.parallel import watchdog
from rl_megatron.parallel.inference import inference_mode
from rl_megatron.parallel.process import Process

_ON_HOST = "the whole mini-batch, on the host of every rank"

LossShare = Callable[[MicroBatch, Tensor], tuple[Tensor, dict[str, Any]]]


class MegatronBackend:
    """The `PolicyBackend` and `RewardBackend` protocols on Megatron-Core.

    Args:
        chunks: This rank's part of the model (models/gpt.py), weights loaded; its head decides
            whether the model has log-probs or scores.
        rules: All weights of the model by name (models/families).
        process: Where this rank stands.
        micro_batching: How sequences are put together for one forward pass.
        optimizer: Adam's settings; None for a frozen model.
        distributed_optimizer: Share optimizer state over data-parallel ranks.
        one_pass: Compute the gradient of the head in the forward pass, where the loss allows it.
        moe_aux_loss_coeff: Coefficient of the balance loss of experts (models/balance.py).
    """

    def __init__(
        self,
        chunks: Sequence[HiddenStatesModel],
        rules: Sequence[WeightRule],
        process: Process,
        micro_batching: MicroBatching,
        optimizer: OptimizerConfig | None = None,
        distributed_optimizer: bool = True,
        one_pass: bool = False,
        moe_aux_loss_coeff: float = 0.0,
    ) -> None:
        self.chunks = list(chunks)
        self.rules = rules
        self.process = process
        self.micro_batching = micro_batching
        self._one_pass = one_pass
        self._balance_coefficient = moe_aux_loss_coeff
        self._offloaded = Offloaded()
        self._save_plan: Any = None
        self._saving: Saving | None = None
        self._optimizer: Any = None
        self._modules: list[Any] = list(chunks)
        if optimizer is None:
            # Parameters still require gradients: torch multiplies by a matrix that does not in
            # another way (one row at a time), and reference and policy would differ in rounding.
            for chunk in chunks:
                chunk.eval()
            return
        self._settings = optimizer
        self._modules = list(wrap_chunks(chunks, distributed_optimizer))
        dtype = chunks[0].config.params_dtype
        self._optimizer = build_optimizer(self._modules, optimizer, dtype, distributed_optimizer)
        for chunk in chunks:
            chunk.config.finalize_model_grads_func = finalize_gradients
            chunk.config.grad_scale_func = self._optimizer.scale_loss

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """Log-prob of every response token of the whole batch; see `PolicyBackend`."""
        assert not self.chunks[0].shape.scalar_head, "a reward model has no log-probs"
        trace("log-probs", _ON_HOST, batch=batch)
        result = torch.zeros(batch.num_tokens, dtype=torch.float32)
        for members, output in self._outputs(batch):
            result[batch.token_index(members)] = output.logprobs.float().cpu()
        return self.process.all_reduce(result)

    def scores(self, batch: PackedBatch) -> Tensor:
        """The reward of every sequence of the whole batch; see `RewardScorer`."""
        assert self.chunks[0].shape.scalar_head, "a policy has no scores"
        trace("scores", _ON_HOST, batch=batch)
        result = torch.zeros(batch.num_sequences, dtype=torch.float32)
        for members, output in self._outputs(batch):
            assert output.scores is not None
            result[members] = output.scores.float().cpu()
        return self.process.all_reduce(result)

    def train_step(self, batch: PackedBatch, objective: Objective, lr: float) -> dict[str, float]:
        """One optimiser step on the whole mini-batch; see `PolicyBackend`."""
        assert self._optimizer is not None, "a frozen model has no optimizer"
        batch = objective.weigh(batch)
        counts = totals(batch)
        trace("mini-batch", _ON_HOST, batch=batch, totals=counts)
        self._set_mode(train=True)
        for module in self._modules:
            module.zero_grad_buffer()
        self._optimizer.zero_grad()
        share = partial(_loss_share, objective, counts)
        gradient = None
        if self._one_pass and objective.token_local:
            gradient = partial(_token_gradient, objective, counts)
        balance = None
        if self._balance_coefficient:
            num_sequences = int((batch.lengths > 0).sum())
            balance = BalanceLoss(self._balance_coefficient, num_sequences, self.process.device)
        outputs = self._run(batch, self._plan(batch), share, gradient, balance, forward_only=False)
        metrics = reduce_metrics(self.process, outputs, self._speaks)
        if balance is not None:
            metrics = with_balance(self.process, metrics, balance.total, balance.coefficient)
        return metrics | self._step(metrics, lr, skip=counts_nothing(batch))

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, whole, on every rank; one at a time."""
        return iter_hf_weights(self.chunks, self.rules, self.process)

    def save(self, folder: Path, *, background: bool = False) -> PendingSave:
        """Write weights and optimizer state; see `PolicyBackend`."""
        if self._save_plan is None:
            self._save_plan = make_save_plan()
        parts: list[Part] = [MegatronWeights(folder, self.chunks, self._save_plan)]
        if self._optimizer is not None:
            parts.append(optimizer_pieces(folder, *self._trained()))
        self._saving = save_parts(folder, self.process, parts, background=background)
        return self._saving

    def load(self, folder: Path) -> None:
        """Read what `save` wrote under any layout."""
        self._settle()
        load_megatron(folder, self.chunks)
        if self._optimizer is not None:
            load_optimizer(folder, *self._trained())

    def offload(self) -> None:
        """Move weights, gradients and optimizer state to host memory; nothing to do on a CPU."""
        self._settle()
        if self.process.device.type != "cpu":
            self._offloaded.take(self._device_tensors())

    def onload(self) -> None:
        """Undo `offload`."""
        self._offloaded.restore()

    def close(self) -> None:
        """Drop model and optimizer."""
        if self._optimizer is not None:
            for wrapper in self._modules:
                # Hooks that autograd keeps hold Megatron's wrapper, which holds model, buffers and
                # groups: a circle that Python's collector does not see through.
                vars(wrapper).clear()
        self._modules = []
        self.chunks = []
        self._optimizer = None

    def _trained(self) -> tuple[Any, ...]:
        """What the state of the optimizer is told by."""
        return self.chunks, self.rules, self._optimizer, self.process

    def _outputs(self, batch: PackedBatch) -> Iterator[tuple[list[int], ModelOutput]]:
        """Sequences, and what the model says of them: all of them once over all ranks."""
        plan = self._plan(batch)
        self._set_mode(train=False)

        def share(micro_batch: MicroBatch, rows: Tensor) -> tuple[Tensor, dict[str, Any]]:
            return rows.new_zeros(()), {"output": micro_batch.output(rows)}

        with inference_mode():
            outputs = self._run(batch, plan, share, forward_only=True)
        if self._speaks:
            for members, output in zip(plan, outputs, strict=True):
                yield members, output["output"]

    @property
    def _speaks(self) -> bool:
        """Whether this rank's results count: one of those that computed them, on the last stage."""
        process = self.process
        return process.is_last_stage and process.tensor_rank == process.context_rank == 0

    def _plan(self, batch: PackedBatch) -> list[list[int]]:
        """The micro-batches of this rank: indices of sequences."""
        layout = self.process.layout
        return plan_micro_batches(
            batch.lengths.tolist(),
            batch.paired,
            layout.data,
            self.micro_batching,
            multiple_of=layout.micro_batch_multiple,
        )[self.process.data_rank]

    def _run(
        self,
        batch: PackedBatch,
        plan: list[list[int]],
        share: LossShare,
        gradient: Callable[[MicroBatch], TokenGradient] | None = None,
        balance: BalanceLoss | None = None,
        *,
        forward_only: bool,
    ) -> list[dict[str, Any]]:
        """Send the planned micro-batches through the model; what `share` said on the last stage."""
        layout = self.process.layout
        micro_batches = [
            make_micro_batch(
                batch.select(members),
                self.process,
                self.micro_batching.packed,
                self.chunks[0].shape.scalar_head,
            )
            for members in plan
        ]

        def forward_step(data: Iterator[MicroBatch], module: Any) -> tuple[Tensor, Any]:
            watchdog.beat()
            micro_batch = next(data)
            context = micro_batch.context(self.chunks[0], balance)
            token_gradient = None if gradient is None else gradient(micro_batch)
            rows = module(micro_batch.tokens, context, micro_batch.targets, token_gradient)
            trace(
                "micro-batch",
                f"one data-parallel rank of {layout.describe()}",
                micro_batch=micro_batch,
                attention=context,
                rows=rows,
            )
            return rows, partial(_as_megatron_loss, share, micro_batch)

        schedule = get_forward_backward_func()
        iterators = [iter(micro_batches) for _ in self._modules]
        outputs: list[dict[str, Any]] = schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if layout.virtual > 1 else iterators[0],
            model=self._modules if layout.virtual > 1 else self._modules[0],
            num_microbatches=len(micro_batches),
            seq_length=max(m.tokens.shape[1] for m in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return outputs

    def _step(self, metrics: dict[str, float], lr: float, skip: bool) -> dict[str, float]:
        """Update the weights unless the numbers are broken; the norm is the one before clipping."""
        self._trace_gradients()
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        check_finite(metrics, norm)
        if not skip:
            self._settle()
            apply_settings(self._optimizer, self._settings, lr)
            self._optimizer.step()
        return step_metrics(norm, lr, skip)

    def _trace_gradients(self) -> None:
        held = (item for chunk in self.chunks for item in chunk.named_parameters())
        gradients = {name: getattr(value, "main_grad", None) for name, value in held}
        where = f"this rank's shards, {self.process.layout.describe()}"
        trace("gradient", where, main_grad=gradients)

    def _settle(self) -> None:
        """Let a save that is under way read all of the state, which is about to change."""
        if self._saving is not None:
            self._saving.settle()

    def _set_mode(self, train: bool) -> None:
        for module in self._modules:
            module.train(train)

    def _device_tensors(self) -> Iterator[Tensor]:
        """Everything this backend keeps on the device."""
        for chunk in self.chunks:
            yield from chunk.parameters()
            yield from (p.main_grad for p in chunk.parameters() if hasattr(p, "main_grad"))
        for part in getattr(self._optimizer, "chained_optimizers", []):
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))


def _loss_share(
    objective: Objective, counts: Totals, micro_batch: MicroBatch, rows: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    output = objective.loss(micro_batch.output(rows), micro_batch.batch, counts)
    trace("loss", "one micro-batch; shares add up", loss=output)
    # Rows nobody asked for are 0: the sum ties an empty micro-batch to the graph.
    loss = output.loss + rows[:, :0].sum()
    shares = {LOSS_TOTAL: output.loss.detach(), **output.metrics}
    return loss, {"shares": shares, "maxima": output.maxima}


def _token_gradient(objective: Objective, counts: Totals, micro_batch: MicroBatch) -> TokenGradient:
    return token_gradient(objective, micro_batch.batch, counts, micro_batch.predicted)


def _as_megatron_loss(
    share: LossShare, micro_batch: MicroBatch, rows: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Megatron's three values: the loss, a token count (unused, see optimizer.py), a report."""
    loss, report = share(micro_batch, rows)
    assert math.prod(loss.shape) == 1
    return loss, torch.zeros((), dtype=torch.int, device=rows.device), report
