"""One attempt of a run on one rank: its process, run folder, logs, metrics and checkpoints."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

from rl_megatron import log
from rl_megatron.checkpoint.publish import durable_file
from rl_megatron.checkpoint.random_state import load_random_state, seed_random_state
from rl_megatron.checkpoint.run_state import RunState
from rl_megatron.config.base import resolved
from rl_megatron.config.loader import dump_run
from rl_megatron.config.runs import GRPORun, RunBase
from rl_megatron.errors import ConfigError
from rl_megatron.interfaces.protocols import Stateful, TrainedModel
from rl_megatron.interfaces.records import Rollout
from rl_megatron.kernels.choose import loss_kernel_on
from rl_megatron.kernels.linear_logprob import describe
from rl_megatron.metrics.curve import draw_curve
from rl_megatron.metrics.progress import RunProgress
from rl_megatron.metrics.rollouts import RolloutWriter
from rl_megatron.metrics.timing import PhaseTimer, Span
from rl_megatron.metrics.trace import start_trace, trace
from rl_megatron.metrics.writer import MetricsWriter
from rl_megatron.parallel import process as processes
from rl_megatron.parallel import watchdog
from rl_megatron.parallel.process import Process
from rl_megatron.runtime.build import start_process
from rl_megatron.runtime.failure import leave_hanging
from rl_megatron.runtime.resume import CHECKPOINTS, CONFIG_FILE, Resumed, find_checkpoint
from rl_megatron.runtime.saver import CheckpointSaver
from rl_megatron.runtime.stopping import Requeue, StopRequest

_PACKAGES = {
    "megatron": ("torch", "megatron-core"),
    "deepspeed": ("torch", "deepspeed", "transformers"),
    "torch": ("torch", "transformers"),
}

logger = logging.getLogger(__name__)


class Job:
    """What a recipe needs besides models and data.

    Attributes:
        run: The configuration.
        process: This rank.
        folder: The run folder.
    """

    def __init__(
        self,
        run: RunBase,
        process: Process,
        title: str,
        shown: Mapping[str, str],
        resumed: Resumed | None,
    ) -> None:
        self.run = run
        self.process = process
        self.folder = Path(run.output_dir)
        self._started = time.time()
        self._title = title
        self._shown = shown
        self._resumed = resumed
        self._total = 0
        self._step = 0 if resumed is None else resumed.state.step
        self._round = 0 if resumed is None else resumed.state.round
        self._saved_step = self._step
        self._timer = PhaseTimer()
        self._saver = CheckpointSaver(run, process, self.folder / CHECKPOINTS)
        self._stop = StopRequest(run.checkpoint, self._started)
        # By one clock: ranks that disagreed would wait for each other.
        process.from_main(self._stop.check)
        self._progress: RunProgress | None = None
        self._policy: TrainedModel | None = None
        self._parts: dict[str, Stateful] = {}

    @classmethod
    @contextmanager
    def start(cls, run: RunBase, title: str, shown: Mapping[str, str]) -> Iterator[Job]:
        """Join the job and open the run folder; close everything when the recipe is done.

        Args:
            run: The configuration.
            title: What is running, e.g. "grpo".
            shown: Label to metric, for the progress bar and the curve.

        Raises:
            ConfigError: The layout does not fit the ranks, or the run folder holds another run.
            CheckpointError: What the run would go on from cannot be used.
        """
        process = start_process(run, processes.world_size_from_environment())
        resumed = process.from_main(lambda: find_checkpoint(run))
        _open_folder(run, process)
        watchdog.start(60 * run.cluster.timeout_minutes, partial(leave_hanging, run, process.rank))
        if run.logging.trace_shapes:
            start_trace(process.rank)
        seed_random_state(run.seed, process)
        job = cls(run, process, title, shown, resumed)
        _log_header(run, process)
        job._stop.listen()
        try:
            yield job
        finally:
            job._stop.stop_listening()
            watchdog.stop()
            job._close()
        if process.is_main:
            curve = draw_curve(job.folder, list(shown.values()))
            logger.info("done: %s", curve or job.folder)

    def resume(self, policy: TrainedModel, **parts: Stateful | None) -> int:
        """Put everything back to where the run stopped, if it did; optimiser steps that are done.

        From then on `rounds` saves these. Collective.

        Args:
            policy: What is trained.
            parts: Whatever else moves on with the run, by the name that it is saved under.

        Raises:
            CheckpointError: The checkpoint does not fit the model, the data or the recipe.
        """
        self._policy = policy
        self._parts = {name: part for name, part in parts.items() if part is not None}
        if self._resumed is not None:
            self._load(self._resumed, policy)
        self._open_writers()
        return self._step

    def rounds(self, total: int) -> Iterator[int]:
        """The rounds that are left of 1 .. total: optimiser steps, or rollout batches.

        At the end of each what is due is saved, `train.save_interval`; the last one always.

        Raises:
            Requeue: The run has saved, and leaves to be started again.
        """
        assert self._policy is not None, "resume() comes before rounds()"
        self._total = total
        interval = max(1, total // 20)
        progress = RunProgress(
            self._title,
            total,
            self.process.rank,
            self._shown,
            first_step=self._round,
            log_interval=interval,
        )
        with progress as self._progress:
            for number in range(self._round + 1, total + 1):
                self._round = number
                self._stop.round_begins()
                yield number
                self._end_round()
            self._saver.finish()

    def phase(self, name: str) -> AbstractContextManager[Span]:
        """A span of time of one verb of the loop."""
        return self._timer.phase(name)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a round and show them.

        Args:
            step: Optimiser steps that are done now.
            metrics: What is known of the round; phase times are added.
        """
        self._step = step
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

    def save(self) -> None:
        """Write a checkpoint before the end of the round, and wait for it. Collective."""
        self._begin_save()
        self._saver.finish()

    def _begin_save(self) -> None:
        assert self._policy is not None, "resume() comes before save()"
        earlier = 0.0 if self._resumed is None else self._resumed.state.wall_seconds
        state = RunState(
            step=self._step,
            round=self._round,
            wall_seconds=earlier + time.time() - self._started,
            config=resolved(self.run),
            layout=asdict(self.process.layout),
            parts={name: part.state_dict() for name, part in self._parts.items()},
        )
        with self.phase("save"):
            self._saver.save(state, self._policy)
        self._saved_step = self._step

    def _end_round(self) -> None:
        reason = self._stop.agreed(self.process)
        is_due = self.is_due(self.run.train.save_interval) or reason is not None
        if is_due and self._saved_step != self._step:
            self._begin_save()
        else:
            self._saver.finish_if_done()
        if reason is not None and self._round < self._total:
            self._saver.finish()
            raise Requeue(f"{reason}: saved step {self._step}, to go on from there")

    def _load(self, resumed: Resumed, policy: TrainedModel) -> None:
        folder, state = resumed.folder, resumed.state
        policy.load(folder)
        for name, part in self._parts.items():
            part.load_state_dict(state.part(name, folder))
        same_layout = state.layout == asdict(self.process.layout)
        if same_layout:
            load_random_state(folder, self.process)
        logger.info("the run goes on after step %d, from %s", state.step, folder)
        if not same_layout:
            logger.info("random generators start anew: the layout is another")

    def _open_writers(self) -> None:
        """Not before the checkpoint is loaded: lines of later steps are dropped."""
        run, resumed_from = self.run, None if self._resumed is None else self._step
        self._writer = MetricsWriter(
            self.folder,
            self.process.rank,
            tensorboard=run.logging.tensorboard,
            wandb_project=run.logging.wandb_project,
            run_name=run.name,
            resumed_from=resumed_from,
        )
        shown = run.logging.rollouts_per_step if isinstance(run, GRPORun) else 0
        self._rollouts = RolloutWriter(self.folder, self.process.rank, shown, resumed_from)

    def _close(self) -> None:
        if self._policy is not None:
            self._writer.close()
            self._rollouts.close()


def _open_folder(run: RunBase, process: Process) -> None:
    """Make the run folder with its config.yaml first, and log into it."""
    folder = Path(run.output_dir)
    attempt = process.from_main(lambda: _make_folder(run, folder))
    log.log_to_run_folder(folder, attempt, process.rank)


def _make_folder(run: RunBase, folder: Path) -> int:
    """The number of this attempt."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with durable_file(folder / CONFIG_FILE) as aside:
            aside.write_text(dump_run(run), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"output_dir {folder} cannot be written: {error}; name another, or change its rights"
        ) from error
    return log.next_attempt(folder)


def _log_header(run: RunBase, process: Process) -> None:
    # On all ranks, for where one of them cannot have it.
    head = describe(run.kernels.linear_logprob, process.device)
    losses = "triton" if loss_kernel_on(process.device, run.kernels.losses) else "torch"
    if not process.is_main:
        return
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES[run.backend])
    layout = process.layout.describe()
    if run.backend == "deepspeed":
        layout = f"ZeRO stage {run.deepspeed.zero_stage} over {process.layout.data}"
    logger.info("%s in %s: backend %s, %s", run.name, run.output_dir, run.backend, run.model.dtype)
    logger.info(
        "%d ranks on %s: %s; python %s, %s",
        process.layout.world_size,
        process.device.type,
        layout,
        platform.python_version(),
        packages,
    )
    logger.info("log-probs by %s, losses by %s", head, losses)
