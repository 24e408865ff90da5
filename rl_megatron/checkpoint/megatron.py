"""Weights in Megatron's own format (torch_dist), readable under any layout."""

from __future__ import annotations

import inspect
import queue
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from rl_megatron.checkpoint.naming import unwrap
from rl_megatron.checkpoint.saving import save_parts
from rl_megatron.errors import CheckpointError
from rl_megatron.parallel.process import Process

_HEAD = "output_layer.weight"


def make_save_plan() -> Any:
    """Where Megatron remembers what ranks write which part of what, from one save to the next.

    One for each model: it holds as long as the model, its layout and the format stay the same.
    """
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    return TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)


class MegatronWeights:
    """This rank's share of the weights, as they are now, to be written; see `Part`. Collective.

    Megatron plans, and says last what is where; in between it would start processes that write.
    The tensors are the live ones: see `save_parts`.

    Args:
        folder: Where to; empty.
        chunks: This rank's part of the model.
        plan: That of earlier saves of the same model, see `make_save_plan`; None to plan anew.
    """

    def __init__(self, folder: Path, chunks: Sequence[nn.Module], plan: Any = None) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        self._folder = folder
        # Megatron asks it for what was written; by default it starts a process to hold it.
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        filesystem_async._results_queue = self._results
        arguments: dict[str, Any] = {"async_sharded_save": True}
        if plan is not None:
            arguments["sharded_strategy"] = plan
            # Ranks that share a plan have compared their parts when it was made.
            arguments["validate_access_integrity"] = plan.cached_central_plan is None
        if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
            arguments["async_strategy"] = "mcore"
        state = _state(chunks, {})
        _own_storages(state)
        self._request = dist_checkpointing.save(state, str(folder), **arguments)
        # Copies what lies on a GPU to the host. A rank with nothing to write has nothing to call.
        self._buckets = self._request.preload_fn() if self._request.preload_fn else []
        self.files = [Path(path) for path, *_ in self._buckets]
        self.reads_live = next(chunks[0].parameters()).device.type == "cpu"

    def write(self) -> dict[int, Any]:
        """Write the files of this rank; what Megatron wants to know of each."""
        from megatron.core.dist_checkpointing.strategies.filesystem_async import (
            FileSystemWriterAsync,
        )

        written = {}
        for number, bucket in enumerate(self._buckets):
            answers: queue.Queue[Any] = queue.Queue()
            waiting: queue.Queue[int] = queue.Queue()
            waiting.put(number)
            FileSystemWriterAsync.write_preloaded_data(
                self._request.async_fn.args[0], number, bucket, answers, waiting, use_fsync=False
            )
            _, written[number] = answers.get()
            if isinstance(written[number], Exception):
                raise OSError(str(written[number]))
        self._buckets = []
        return written

    def finish(self, written: dict[int, Any]) -> None:
        """Write what makes it a checkpoint. Collective.

        Raises:
            CheckpointError: It cannot be written.
        """
        from megatron.core.dist_checkpointing.core import CheckpointingException

        if written:
            self._results.put(written)
        try:
            for finalize in self._request.finalize_fns:
                finalize()
        except (CheckpointingException, CheckpointException, OSError) as error:
            raise CheckpointError(f"{self._folder} cannot be written: {_reason(error)}") from error


def save_megatron(folder: Path, chunks: Sequence[nn.Module], process: Process) -> None:
    """Write the weights into an empty folder. Collective.

    Args:
        folder: Where to.
        chunks: This rank's part of the model.
        process: This rank.

    Raises:
        CheckpointError: A rank could not write.
    """
    save_parts(folder, process, [MegatronWeights(folder, chunks)], background=False)


def load_megatron(folder: Path, chunks: Sequence[nn.Module], head: Tensor | None = None) -> None:
    """Fill the weights from what was saved. Collective.

    Args:
        folder: The checkpoint.
        chunks: This rank's model chunks.
        head: A scalar head [1, H] in place of the checkpoint's own head over the vocabulary.

    Raises:
        CheckpointError: A parameter that the checkpoint lacks, or holds in another shape.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.validation import StrictHandling

    try:
        metadata = dist_checkpointing.load_content_metadata(str(folder))
        template = _state(chunks, metadata or {})
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


def _state(chunks: Sequence[nn.Module], metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: chunk.sharded_state_dict(metadata=dict(metadata)) for key, chunk in _named(chunks)}


def _own_storages(state: dict[str, Any]) -> None:
    """Give each tensor on the host a storage that ends where the tensor ends, of the same memory.

    Megatron clones a tensor that is a part of a larger one, because torch would write all of that.
    Its weights are parts of its buffers.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    apply_factories(state)
    for value in nested_values(state):
        if isinstance(value, ShardedTensor) and value.data is not None:
            value.data = _own_storage(value.data.detach())


def _own_storage(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return tensor
    flat = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy())
    return flat.view(tensor.dtype).view(tensor.shape)
