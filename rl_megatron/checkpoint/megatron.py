"""Megatron's own checkpoints (torch_dist): readable under any layout and padded vocabulary."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from rl_megatron.checkpoint.naming import unwrap
from rl_megatron.checkpoint.writer_results import results_queue
from rl_megatron.errors import CheckpointError

_SHARDING = "distrib_optim_sharding_type"
# The optimizer's state in the shape of its parameters, readable under any layout; or in that of its
# buckets, which is faster to write and to read.
_RESHARDABLE, _SAME_LAYOUT = "fully_reshardable", "dp_reshardable"
_HEAD = "output_layer.weight"
_COPY_TENSORS = "_set_main_param_and_optimizer_states"


class MegatronSave:
    """A save that is under way; see `PendingSave`."""

    def __init__(self, folder: Path, request: Any, background: bool) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import TemporalAsyncCaller

        self._folder = folder
        self._request: Any = request.freeze()
        self._caller = TemporalAsyncCaller() if background else None
        if self._caller is not None:
            self._caller.schedule_async_call(self._request)

    def is_done(self) -> bool:
        """Whether this rank has nothing more to write."""
        process = None if self._caller is None else self._caller.process
        return process is None or not process.is_alive()

    def finish(self) -> None:
        """Wait until all ranks have written, then write what makes it a checkpoint. Collective.

        Only the first call does anything.

        Raises:
            CheckpointError: A rank could not write.
        """
        from megatron.core.dist_checkpointing.core import CheckpointingException

        request, self._request = self._request, None
        if request is None:
            return
        try:
            if self._caller is None:
                request.execute_sync()
                return
            self._caller.close()
            for finalize in request.finalize_fns:
                finalize()
        except (CheckpointingException, CheckpointException, OSError) as error:
            raise CheckpointError(f"{self._folder} cannot be written: {_reason(error)}") from error


def make_save_plan() -> Any:
    """Where Megatron remembers what ranks write which part of what, from one save to the next.

    One for each model: it holds as long as the model, its layout and the format stay the same.
    """
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    return TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)


def save_megatron(
    folder: Path,
    chunks: Sequence[nn.Module],
    optimizer: Any = None,
    *,
    plan: Any = None,
    reshardable: bool = True,
    background: bool = False,
) -> MegatronSave:
    """Begin to write weights, and the optimizer's state if there is one, into an empty folder.

    Collective. What is written is the state of now: in the background a fork of this process
    writes, which keeps the tensors as they are.

    Args:
        folder: Where to.
        chunks: This rank's part of the model.
        optimizer: Megatron's optimizer.
        plan: That of earlier saves of the same model, see `make_save_plan`; None to plan anew.
        reshardable: Write the optimizer's state so that it can be read under any layout.
        background: Return at once; nothing is on disk before `finish`.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = results_queue()
    metadata = {_SHARDING: _RESHARDABLE if reshardable else _SAME_LAYOUT}
    arguments: dict[str, Any] = {"content_metadata": metadata, "async_sharded_save": True}
    if plan is not None:
        arguments["sharded_strategy"] = plan
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        arguments["async_strategy"] = "mcore"
    state = _state(chunks, optimizer, metadata, is_loading=False)
    request = dist_checkpointing.save(state, str(folder), **arguments)
    save = MegatronSave(folder, request, background)
    if not background:
        save.finish()
    return save


def load_megatron(
    folder: Path,
    chunks: Sequence[nn.Module],
    optimizer: Any = None,
    head: Tensor | None = None,
) -> None:
    """Fill weights, and the optimizer's state if given, from what was saved. Collective.

    Args:
        folder: The checkpoint.
        chunks: This rank's model chunks.
        optimizer: Megatron's.
        head: A scalar head [1, H] in place of the checkpoint's own head over the vocabulary.

    Raises:
        CheckpointError: A parameter that the checkpoint lacks, or holds in another shape.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.validation import StrictHandling

    try:
        metadata = dist_checkpointing.load_content_metadata(str(folder))
        template = _state(chunks, optimizer, metadata or {_SHARDING: _RESHARDABLE}, is_loading=True)
        if head is not None:
            for key, _ in _named(chunks):
                template[key].pop(_HEAD, None)
        with warnings.catch_warnings():
            # Megatron's own business with torch.distributed.checkpoint.
            warnings.simplefilter("ignore", FutureWarning)
            state = dist_checkpointing.load(
                template, str(folder), strict=StrictHandling.RAISE_UNEXPECTED
            )
    except (CheckpointingException, CheckpointException, OSError) as error:
        raise CheckpointError(
            f"The Megatron checkpoint {folder} does not fit the model: {_reason(error)}. "
            "Was it made from the same model, and copied whole?"
        ) from error
    for key, chunk in _named(chunks):
        if head is not None and _HEAD in dict(chunk.named_parameters()):
            state[key][_HEAD] = head
        chunk.load_state_dict(state[key])
    if optimizer is not None:
        _load_optimizer(optimizer, state["optimizer"])


def _reason(error: BaseException) -> str:
    """The error itself, or the first of those that torch gathered from all ranks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    # Only the rank that gathers them has them.
    failures = [f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()]
    return failures[0] if failures else "it failed on some rank; rank 0 says why"


def _named(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Megatron's keys: `model`, or `model0`, `model1`, ... for the chunks of a virtual pipeline."""
    for index, chunk in enumerate(chunks):
        yield ("model" if len(chunks) == 1 else f"model{index}"), unwrap(chunk)


def _state(
    chunks: Sequence[nn.Module], optimizer: Any, metadata: dict[str, Any], is_loading: bool
) -> dict[str, Any]:
    state: dict[str, Any] = {
        key: chunk.sharded_state_dict(metadata=dict(metadata)) for key, chunk in _named(chunks)
    }
    if optimizer is not None:
        _fill_adam_state(optimizer)
        state["optimizer"] = optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=dict(metadata)
        )
    return state


def _torch_adams(optimizer: Any) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
    """Megatron's optimizers whose Adam is torch's: those of machines without Apex and TE."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            yield part, part.optimizer


def _fill_adam_state(optimizer: Any) -> None:
    """Give an Adam that has not stepped yet the zero state that its first step would make.

    Megatron cannot describe torch's Adam without state.
    """
    for _, adam in _torch_adams(optimizer):
        for group in adam.param_groups:
            for parameter in group["params"]:
                if not adam.state[parameter]:
                    adam.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def _load_optimizer(optimizer: Any, state: Any) -> None:
    """Load Megatron's optimizer state, around mistakes it makes with torch's Adam.

    Torch keeps the step among the tensors of each parameter. Megatron's distributed optimizer
    looks for it among the tensors in the file, where it is not; and it gives all parameters one
    and the same step tensor, which then grows by one for each parameter instead of each step.
    """
    with contextlib.ExitStack() as undo:
        for part, adam in _torch_adams(optimizer):
            if hasattr(part, _COPY_TENSORS):
                setattr(part, _COPY_TENSORS, _copy_with_step(getattr(part, _COPY_TENSORS), adam))
                undo.callback(delattr, part, _COPY_TENSORS)
        # Of its formats the one of buckets writes into parameters as if none needed a gradient.
        with torch.no_grad():
            optimizer.load_state_dict(state)
    for _, adam in _torch_adams(optimizer):
        for tensors in adam.state.values():
            tensors["step"] = tensors["step"].clone()


def _copy_with_step(
    copy: Callable[[Any, dict[str, Any]], None], adam: torch.optim.Optimizer
) -> Callable[[Any, dict[str, Any]], None]:
    def copy_with_step(parameter: Any, tensors: dict[str, Any]) -> None:
        step = next(iter(adam.state.values()))["step"]
        copy(parameter, {**tensors, "step": step})

    return copy_with_step
