"""One attempt of a run on one rank: its process, run folder, logs, metrics and checkpoints."""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rl_megatron import log
from rl_megatron.checkpoint.folders import HF_SUBFOLDER, resolve_model_folder
from rl_megatron.checkpoint.hf_files import carry_hf_files, copy_side_files
from rl_megatron.checkpoint.publish import new_checkpoint
from rl_megatron.config.loader import dump_run
from rl_megatron.config.runs import DPORun, GRPORun, RunBase, SFTRun
from rl_megatron.errors import ConfigError
from rl_megatron.interfaces.protocols import PolicyBackend
from rl_megatron.interfaces.records import Rollout
from rl_megatron.kernels.choose import loss_kernel_on
from rl_megatron.kernels.linear_logprob import describe
from rl_megatron.metrics.curve import draw_curve
from rl_megatron.metrics.progress import RunProgress
from rl_megatron.metrics.rollouts import RolloutWriter
from rl_megatron.metrics.timing import PhaseTimer, Span
from rl_megatron.metrics.trace import start_trace, trace
from rl_megatron.metrics.writer import METRICS_FILE, MetricsWriter
from rl_megatron.parallel import process as processes
from rl_megatron.parallel.process import Process
from rl_megatron.runtime.build import start_process

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"

logger = logging.getLogger(__name__)


class Job:
    """What a recipe needs besides models and data.

    Attributes:
        run: The configuration.
        process: This rank.
        folder: The run folder.
    """

    def __init__(
        self, run: SFTRun | DPORun | GRPORun, process: Process, title: str, shown: Mapping[str, str]
    ) -> None:
        self.run = run
        self.process = process
        self.folder = Path(run.output_dir)
        self._started = time.time()
        self._title = title
        self._shown = shown
        self._round = self._total = 0
        self._timer = PhaseTimer()
        self._writer = MetricsWriter(
            self.folder,
            process.rank,
            tensorboard=run.logging.tensorboard,
            wandb_project=run.logging.wandb_project,
            run_name=run.name,
        )
        shown_rollouts = run.logging.rollouts_per_step if isinstance(run, GRPORun) else 0
        self._rollouts = RolloutWriter(self.folder, process.rank, shown_rollouts)
        self._progress: RunProgress | None = None

    @classmethod
    @contextmanager
    def start(
        cls, run: SFTRun | DPORun | GRPORun, title: str, shown: Mapping[str, str]
    ) -> Iterator[Job]:
        """Join the job and open the run folder; close everything when the recipe is done.

        Args:
            run: The configuration.
            title: What is running, e.g. "grpo".
            shown: Label to metric, for the progress bar and the curve.

        Raises:
            ConfigError: The layout does not fit the ranks, or the run folder holds a run.
        """
        process = start_process(run, processes.world_size_from_environment())
        _open_folder(run, process)
        if run.logging.trace_shapes:
            start_trace(process.rank)
        job = cls(run, process, title, shown)
        _log_header(run, process)
        yield job
        job._writer.close()
        job._rollouts.close()
        if process.is_main:
            curve = draw_curve(job.folder, list(shown.values()))
            logger.info("done: %s", curve or job.folder)

    def rounds(self, total: int) -> Iterator[int]:
        """1 .. total, with a progress bar: optimiser steps, or rollout batches."""
        self._total = total
        interval = max(1, total // 20)
        progress = RunProgress(
            self._title, total, self.process.rank, self._shown, log_interval=interval
        )
        with progress as self._progress:
            for self._round in range(1, total + 1):
                yield self._round

    def phase(self, name: str) -> AbstractContextManager[Span]:
        """A span of time of one verb of the loop."""
        return self._timer.phase(name)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a round and show them.

        Args:
            step: Optimiser steps that are done now.
            metrics: What is known of the round; phase times are added.
        """
        everything = {**metrics, **self._timer.collect()}
        if self._round % self.run.train.log_interval == 0 or self._round == self._total:
            self._writer.write(step, everything)
        assert self._progress is not None, "record() belongs inside rounds()"
        self._progress.update(self._round, everything)

    def record_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation and show them on a line of their own."""
        if not metrics:
            return
        self._writer.write(step, metrics)
        shown = "  ".join(f"{name.partition('/')[2]} {v:.4g}" for name, v in metrics.items())
        if self.process.is_main:
            logger.info("evaluation after step %d: %s", step, shown)

    def record_rollouts(
        self, step: int, rollouts: Sequence[Rollout], rewards: Sequence[float | None]
    ) -> None:
        """Write a few rollouts, sampled at the start of step `step`."""
        trace(
            "rollout and score",
            "all of the batch, on every rank",
            rollouts=rollouts,
            rewards=rewards,
        )
        self._rollouts.write(step, rollouts, rewards)

    def is_due(self, interval: int) -> bool:
        """Whether what happens every `interval` rounds happens now; always in the last one."""
        return self._round == self._total or (interval > 0 and self._round % interval == 0)

    def save(self, step: int, policy: PolicyBackend, **state: Any) -> None:
        """Write a checkpoint of the policy after optimiser step `step`. Collective.

        Args:
            step: Optimiser steps that are done.
            policy: What is saved.
            state: Anything else that a resumed run would need, as JSON.
        """
        root = self.folder / CHECKPOINTS
        source = resolve_model_folder(Path(self.run.model.path)).hf
        with self.phase("save"), new_checkpoint(root, step, self.process) as folder:
            policy.save(folder)
            if self.process.is_main:
                if self.run.backend == "megatron":
                    carry_hf_files(source, folder / HF_SUBFOLDER)
                else:
                    copy_side_files(source, folder)
                row = {"step": step, "wall_seconds": time.time() - self._started, **state}
                (folder / "run_state.json").write_text(json.dumps(row) + "\n", encoding="utf-8")
        logger.info("saved %s", root)


def _open_folder(run: RunBase, process: Process) -> None:
    """Make the run folder with its config.yaml first, and log into it."""
    folder = Path(run.output_dir)
    # An attempt that found a mistake before its first step leaves an empty file, and is no run.
    metrics = folder / METRICS_FILE
    taken = (metrics.exists() and metrics.stat().st_size > 0) or (folder / CHECKPOINTS).exists()
    if any(process.gather(taken)):
        raise ConfigError(
            f"output_dir {folder} holds a run already ({METRICS_FILE} or {CHECKPOINTS}/); name "
            "another output_dir, or remove the folder"
        )
    if process.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(dump_run(run), encoding="utf-8")
    attempt = process.gather(log.next_attempt(folder) if process.is_main else 0)[0]
    log.log_to_run_folder(folder, attempt, process.rank)


def _log_header(run: RunBase, process: Process) -> None:
    # On all ranks, for where one of them cannot have it.
    head = describe(run.kernels.linear_logprob, process.device)
    losses = "triton" if loss_kernel_on(process.device, run.kernels.losses) else "torch"
    if not process.is_main:
        return
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core"))
    logger.info("%s in %s: backend %s, %s", run.name, run.output_dir, run.backend, run.model.dtype)
    logger.info(
        "%d ranks on %s: %s; python %s, %s",
        process.layout.world_size,
        process.device.type,
        process.layout.describe(),
        platform.python_version(),
        packages,
    )
    logger.info("log-probs by %s, losses by %s", head, losses)
