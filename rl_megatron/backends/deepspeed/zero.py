"""What a rank holds of the training state, one way for all stages of ZeRO.

DeepSpeed's public functions give a whole parameter to all ranks; what one rank holds of it is in
the attributes of its optimizers, which only this module reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rl_megatron.checkpoint.pieces import Piece
from rl_megatron.parallel.process import Process

_MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroState(Protocol):
    """Gradients, main weights and Adam's moments. All ranks call every method but `pieces`."""

    def gradient_norm(self) -> float:
        """L2 norm over all parameters and ranks, before clipping; inf if it is not finite."""
        ...

    def drop_gradients(self) -> None:
        """Forget the gradients of the backward passes since the last step."""
        ...

    def pieces(self, *, is_loading: bool) -> Iterator[Piece]:
        """What this rank holds of main weights and moments, and is to write or to read."""
        ...

    def weights_changed(self) -> None:
        """Make the model's weights what the main weights are in the model's dtype."""
        ...


def zero_state(engine: Any, process: Process) -> ZeroState:
    """The state of an engine with an optimizer; names are those of its module's parameters."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return _Sharded(optimizer, names, process)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return _Partitioned(optimizer, names)
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        return _PartitionedBF16(optimizer, names)
    return _Whole(engine, names, process)


class _Whole:
    """Stage 0: torch's own optimizer, the same on every rank."""

    def __init__(self, engine: Any, names: Mapping[int, str], process: Process) -> None:
        self._engine = engine
        self._names = names
        self._process = process

    def gradient_norm(self) -> float:
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        return _finite(torch.nn.utils.get_total_norm(gradients))

    def drop_gradients(self) -> None:
        self._engine.zero_grad()

    def pieces(self, *, is_loading: bool) -> Iterator[Piece]:
        ranks = self._process.layout.world_size
        for parameter in self._parameters():
            # Every rank reads all; each writes its share.
            share = parameter.numel() if is_loading else -(-parameter.numel() // ranks)
            start = 0 if is_loading else self._process.rank * share
            state = _adam_state(self._engine.optimizer, parameter)
            tensors = {
                name: tensor.view(-1)[start : start + share] for name, tensor in state.items()
            }
            if tensors["main"].numel():
                yield Piece(self._names[id(parameter)], tuple(parameter.shape), start, tensors)

    def weights_changed(self) -> None:
        """The main weights are the model's own."""

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self._engine.optimizer.param_groups:
            yield from group["params"]


class _Partitioned:
    """Stages 1 and 2: each rank holds an equal part of a group's parameters laid end to end."""

    def __init__(self, optimizer: Any, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._names = names

    def gradient_norm(self) -> float:
        self._optimizer._wait_for_offload_copies()
        return _finite(self._optimizer.scaled_global_norm())

    def drop_gradients(self) -> None:
        optimizer = self._optimizer
        optimizer.micro_step_id = -1
        optimizer.zero_grad(set_to_none=True)
        optimizer._release_preflattened_grad_buffers()
        if optimizer.cpu_offload:
            optimizer._offload_accumulated_param_ids = set()
            optimizer.reset_cpu_buffers()
            return
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None
            optimizer.all_grad_tensors[group] = None

    def pieces(self, *, is_loading: bool) -> Iterator[Piece]:
        del is_loading  # What it writes is what it reads.
        for flat, parameters in self._groups():
            state = _adam_state(self._optimizer.optimizer, flat)
            for parameter in parameters:
                fragment = parameter._hp_mapping
                if fragment is None:
                    continue  # It lies in the parts of other ranks.
                place = fragment.hp_fragment_address
                tensors = {
                    name: tensor.narrow(0, place.start, place.numel)
                    for name, tensor in state.items()
                }
                start = fragment.lp_fragment_address.start
                yield Piece(self._names[id(parameter)], tuple(parameter.shape), start, tensors)

    def weights_changed(self) -> None:
        self._optimizer.update_lp_params()

    def _groups(self) -> Iterator[tuple[Tensor, list[nn.Parameter]]]:
        """This rank's main weights of each group, and the group's parameters."""
        optimizer = self._optimizer
        yield from zip(
            optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True
        )


class _PartitionedBF16(_Partitioned):
    """Stage 1 of a bf16 model, which has a class of its own: gradients are whole, in float32."""

    def gradient_norm(self) -> float:
        gradients, _ = self._optimizer.get_grads_for_norm()
        return _finite(torch.nn.utils.get_total_norm(gradients))

    def drop_gradients(self) -> None:
        self._optimizer.clear_hp_grads()
        self._optimizer.clear_lp_grads()

    def _groups(self) -> Iterator[tuple[Tensor, list[nn.Parameter]]]:
        optimizer = self._optimizer
        yield from zip(optimizer.fp32_groups_flat_partition, optimizer.bf16_groups, strict=True)


class _Sharded:
    """Stage 3: each rank holds an equal part of every parameter; the last one's is padded."""

    def __init__(self, optimizer: Any, names: Mapping[int, str], process: Process) -> None:
        self._optimizer = optimizer
        self._names = names
        self._process = process

    def gradient_norm(self) -> float:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        return _finite(combine_grad_norm_groups(self._optimizer._get_norm_groups()))

    def drop_gradients(self) -> None:
        self._optimizer._pre_step()
        self._optimizer._overflow_clean_up(1.0)

    def pieces(self, *, is_loading: bool) -> Iterator[Piece]:
        for number, parameters in enumerate(self._optimizer.fp16_groups):
            with self._at_hand(number, changes=is_loading) as (state, stays):
                offset = 0
                for parameter in parameters:
                    size = parameter.partition_numel()
                    start = self._process.rank * size
                    held = max(0, min(size, parameter.ds_numel - start))
                    tensors = {name: t.narrow(0, offset, held) for name, t in state.items()}
                    offset += size
                    if not (stays or is_loading):
                        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
                    if held:
                        shape = tuple(parameter.ds_shape)
                        yield Piece(self._names[id(parameter)], shape, start, tensors)

    def weights_changed(self) -> None:
        optimizer = self._optimizer
        optimizer._partition_all_parameters()
        for number in range(len(optimizer.fp16_groups)):
            with self._at_hand(number, changes=False):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    @contextmanager
    def _at_hand(self, number: int, *, changes: bool) -> Iterator[tuple[dict[str, Tensor], bool]]:
        """Main weights and moments of a group, and whether they stay in memory afterwards.

        One that is offloaded to nvme is in memory inside only, and written back if it `changes`.
        """
        optimizer = self._optimizer
        waits_on_disk = optimizer._swappable_optimizer_subgroup(number)
        if waits_on_disk:
            optimizer._optimizer_states_and_gradient_swap_in(number)
        flat = optimizer.fp32_partitioned_groups_flat[number]
        yield _adam_state(optimizer.optimizer, flat), not waits_on_disk
        if waits_on_disk and changes:
            optimizer._optimizer_states_and_gradient_swap_out(number)
        elif waits_on_disk:
            optimizer._release_swap_buffers(number)


def adam_step(engine: Any) -> int:
    """Updates that Adam has made."""
    adam = _adam(engine.optimizer)
    steps = {int(state["step"]) for state in adam.state.values()}
    assert len(steps) <= 1, f"Adam's steps differ: {steps}"
    return steps.pop() if steps else 0


def set_adam_step(engine: Any, step: int) -> None:
    """Make Adam go on as after `step` updates; its state is there, see `ZeroState.pieces`."""
    for state in _adam(engine.optimizer).state.values():
        # Torch's Adam counts in a tensor, DeepSpeed's in a number.
        if isinstance(state["step"], Tensor):
            state["step"].fill_(step)
        else:
            state["step"] = step


def _adam(optimizer: Any) -> Any:
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


def _adam_state(adam: Any, main: Tensor) -> dict[str, Tensor]:
    """Main weights and moments; before the first step those that it will begin with."""
    state = adam.state[main]
    if not state:
        counts_in_tensor = isinstance(adam, torch.optim.AdamW)
        state["step"] = torch.zeros((), device=main.device) if counts_in_tensor else 0
        for name in _MOMENTS:
            state[name] = torch.zeros_like(main)
    return {"main": main.detach(), **{name: state[name] for name in _MOMENTS}}


def _finite(norm: Tensor | float) -> float:
    """DeepSpeed says -1 where something is not finite."""
    norm = float(norm)
    return norm if math.isfinite(norm) and norm >= 0 else math.inf
