"""Writes checkpoints of a run, in the background if that is asked for, one at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from rl_megatron.checkpoint.folders import HF_SUBFOLDER, resolve_model_folder
from rl_megatron.checkpoint.hf_files import carry_hf_files, copy_side_files
from rl_megatron.checkpoint.hf_reward import become_reward_model
from rl_megatron.checkpoint.publish import NewCheckpoint
from rl_megatron.checkpoint.random_state import save_random_state
from rl_megatron.checkpoint.run_state import RunState
from rl_megatron.config.runs import RewardModelRun, RunBase
from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces.protocols import PendingSave, TrainedModel
from rl_megatron.parallel.process import Process

logger = logging.getLogger(__name__)


class CheckpointSaver:
    """Every method is called by all ranks together.

    Args:
        run: The configuration.
        process: This rank.
        root: `checkpoints/` of the run folder.
    """

    def __init__(self, run: RunBase, process: Process, root: Path) -> None:
        self._run = run
        self._process = process
        self._root = root
        self._pending: tuple[PendingSave, NewCheckpoint, int] | None = None

    def save(self, state: RunState, policy: TrainedModel) -> None:
        """Begin a checkpoint of now; one that is still being written is waited for first.

        Raises:
            CheckpointError: It cannot be written.
        """
        self.finish()
        settings = self._run.checkpoint
        with self._explained(state.step):
            new = NewCheckpoint(self._root, state.step, self._process)
            pending = policy.save(new.aside, background=settings.async_save)
            save_random_state(new.aside, self._process)
            if self._process.is_main:
                self._write_side_files(new.aside)
                state.write(new.aside)
        self._pending = pending, new, state.step
        if not settings.async_save:
            self.finish()

    def finish_if_done(self) -> None:
        """Publish what has been written in the background, once all ranks have."""
        if self._pending is None:
            return
        busy = torch.tensor(int(not self._pending[0].is_done()))
        if not int(self._process.all_reduce(busy, op=dist.ReduceOp.MAX)):
            self.finish()

    def finish(self) -> None:
        """Wait for what is being written, and publish it.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._pending is None:
            return
        pending, new, step = self._pending
        self._pending = None
        with self._explained(step):
            pending.finish()
            new.publish(self._run.checkpoint.keep_last)
        logger.info("saved step %d in %s", step, self._root)

    def _write_side_files(self, folder: Path) -> None:
        source = resolve_model_folder(Path(self._run.model.path)).hf
        described = folder
        if self._run.backend == "megatron":
            described = folder / HF_SUBFOLDER
            carry_hf_files(source, described)
        else:
            copy_side_files(source, folder)
        if isinstance(self._run, RewardModelRun):
            become_reward_model(described)

    @contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, OSError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self._root} could not be written: {error}. "
                "Earlier checkpoints are as they were. Give it space (checkpoint.keep_last deletes "
                "old ones) and the right to write, and start the run again: it goes on from the "
                "last one."
            ) from error
