"""Forward passes without gradients, next to training in the same process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core import parallel_state


@contextmanager
def inference_mode() -> Iterator[None]:
    """`torch.inference_mode` that leaves nothing behind for training to trip over.

    Megatron keeps buffers for the gathered inputs of sequence parallelism. One that is made in
    inference mode may never be written by a training step, so they are dropped on leaving.
    """
    try:
        with torch.inference_mode():
            yield
    finally:
        parallel_state.get_global_memory_buffer().buffer.clear()
