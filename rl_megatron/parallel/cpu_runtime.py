"""Megatron-Core on a machine without CUDA.

Megatron asks for CUDA in many places even where the work is plain torch. Where no CUDA device
exists, `install()` hands Megatron's own modules a view of torch that answers those questions for
the CPU. Only Megatron's modules see it: everybody else's torch is untouched, except for two
tensor methods that cannot be reached any other way. On a machine with CUDA nothing is patched.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Imported up front so that install() finds them loaded and can hand them the view.
_MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.distributed",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.moe.token_dispatcher",
)
_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like")


class _Stream:
    """A stream or event that has always just finished."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    record = wait = wait_stream = wait_event = synchronize = record_stream = _nothing

    def query(self) -> bool:
        return True

    def record_event(self) -> _Stream:
        return _Stream()


@contextlib.contextmanager
def _stream_context(_: Any) -> Iterator[None]:
    yield


def _nothing(*_: Any, **__: Any) -> None:
    return None


class _View(types.ModuleType):
    """A module that answers some names itself and passes the rest on."""

    def __init__(self, base: types.ModuleType, answers: dict[str, Any]) -> None:
        super().__init__(base.__name__)
        self.__dict__.update(answers)
        self.__dict__["_base"] = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)


def _is_cuda(device: Any) -> bool:
    return device is not None and str(device).startswith("cuda")


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _all_gather(
    outputs: list[Tensor], value: Tensor, group: ProcessGroup | None = None, **more: Any
) -> Any:
    """`dist.all_gather` of parts that need not be of one size, which gloo refuses."""
    if len({output.shape for output in outputs}) == 1:
        return dist.all_gather(outputs, value, group=group, **more)
    for rank, output in enumerate(outputs):
        if rank == dist.get_rank(group):
            output.copy_(value)
        if output.numel():
            dist.broadcast(output, group=group, group_src=rank)
    return None


def _reduce_scatter(
    output: Tensor,
    parts: list[Tensor],
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: ProcessGroup | None = None,
    **more: Any,
) -> Any:
    """`dist.reduce_scatter` of parts that need not be of one size, which gloo refuses."""
    if len({part.shape for part in parts}) == 1:
        return dist.reduce_scatter(output, parts, op, group, **more)
    for rank, part in enumerate(parts):
        total = part.clone()
        if part.numel():
            dist.reduce(total, op=op, group=group, group_dst=rank)
        if rank == dist.get_rank(group):
            output.copy_(total)
    return None


def _torch_view() -> _View:
    cuda = _View(
        torch.cuda,
        {
            "current_device": lambda: _CPU,
            "set_device": _nothing,
            "synchronize": _nothing,
            "Stream": _Stream,
            "Event": _Stream,
            "current_stream": lambda *_: _Stream(),
            "default_stream": lambda *_: _Stream(),
            "set_stream": _nothing,
            "stream": _stream_context,
            "manual_seed": torch.manual_seed,
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "set_rng_state": lambda state, *_: torch.set_rng_state(state),
            "nvtx": _View(torch.cuda.nvtx, {"range_push": _nothing, "range_pop": _nothing}),
        },
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    uneven = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter}
    return _View(torch, {"cuda": cuda, "distributed": _View(dist, uneven), **factories})


def _patch_tensor_methods() -> None:
    """`Tensor.cuda()` stays on the CPU; `Tensor.type()` gives the name Megatron compares with."""
    tensor_class: Any = torch.Tensor
    plain_type = tensor_class.type

    def type_(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return plain_type(self).replace("torch.", "torch.cuda.", 1)
        return plain_type(self, dtype, *args, **kwargs)

    tensor_class.type = type_
    tensor_class.cuda = lambda self, *_, **__: self


def _patch_random() -> None:
    """The tracker of model-parallel random streams keeps the CPU generator's states."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # It warns when the CPU's generator moves while a stream is in use; here that is the stream.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


def _patch_experts() -> None:
    """Tokens go to their experts' ranks as on a GPU.

    Megatron turns split sizes into numbers only where it moves them off a GPU, and leaves tensors
    elsewhere, which all-to-all refuses.
    """
    dispatcher: Any = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    move = dispatcher.maybe_move_tensor_to_cpu

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and isinstance(tensor, Tensor):
            return tensor.numpy()
        return move(tensor, as_numpy, record_stream)

    dispatcher.maybe_move_tensor_to_cpu = moved
    # Without Transformer Engine the router of 0.16 looks up a name that was never bound.
    moe_utils: Any = sys.modules["megatron.core.transformer.moe.moe_utils"]
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def needed() -> bool:
    """Whether this process has no CUDA device."""
    return not torch.cuda.is_available()


_installed = False


def install() -> None:
    """Make Megatron-Core run here. Does nothing where a CUDA device exists, or a second time."""
    global _installed
    if _installed or not needed():
        return
    for name in _MODULES:
        importlib.import_module(name)
    view = _torch_view()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = view  # type: ignore[attr-defined]
    _patch_tensor_methods()
    _patch_random()
    _patch_experts()
    _installed = True
