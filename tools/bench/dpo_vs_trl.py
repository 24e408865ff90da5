"""DPO beside TRL's DPOTrainer: steps per second, and whether the losses are the same.

    python tools/bench/dpo_vs_trl.py [--steps 32] [--hidden 64] [--median 64] [--json]

Both train the same model folder on the same pairs in the same order, on one device and one
thread, in float32, with reference log-probs computed before, AdamW with the same numbers, the same
clipping, no dropout and no recomputation, and write metrics in every step. Each is a process of its
own, and they take steps in turn. A step is all of one: its batch, its reference log-probs, forward
and backward pass, update, metrics. Steps per second are 1 / the median of all but the first; on a
CPU in CPU time, so that others on the machine do not count (in `--json` by the clock, too). Losses
are those of every step. TRL has a micro-batch of the whole mini-batch, padded to its longest
sequence; ours has the default, packed. Lengths are log-normal as those of chats are, shorter by
default.

Where time goes in ours, by torch.profiler: with `--hidden 256 --layers 4 --median 200 --longest
1024`, 56 % of a step are matrix products and 23 % attention, and the ratio can be little more than
what TRL computes of padding (`trl_tokens_per_token`, 2.3 there). With the defaults it is 30 % and
17 %, and the rest are operators of at most 5 % each. With `--median 16 --longest 64` products are
22 % of a step of some 40 ms, and the rest are thousands of calls to small operators, none of which
has more than 6 %: their number does not fall with the tokens, so less padding saves little.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rl_megatron import log  # noqa: E402
from rl_megatron.config import DPORun  # noqa: E402
from rl_megatron.data.preferences import load_preferences  # noqa: E402
from rl_megatron.data.tokenizer import load_tokenizer  # noqa: E402
from tools.bench.dpo_task import TaskSize, make_run, write_task  # noqa: E402

DEFAULTS = {
    "pairs": 64,
    "batch": 8,
    "median": 64,
    "longest": 512,
    "hidden": 64,
    "layers": 2,
    "vocab": 512,
}
NOT_INSTALLED = "trl is not installed (pip install -e .[bench])"


class Turns:
    """The end of a process that takes steps: each begins when the other process has had its own."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._cpu = self._wall = 0.0

    def wait(self) -> None:
        """Until it is this process's turn."""
        self._connection.recv()
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def done(self) -> None:
        """A step has ended."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        cpu, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        self._connection.send((cpu, wall))


@dataclass
class Side:
    """What one of the two did.

    Attributes:
        losses: Of every step.
        cpu: CPU seconds of every step.
        wall: Seconds of every step.
    """

    losses: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def steps_per_second(self, clock: str) -> float:
        """Of all steps but the first."""
        return 1 / median(getattr(self, clock)[1:])


def our_steps(run: DPORun, connection: Connection) -> None:
    """The loop of recipes/dpo/train.py."""
    torch.set_num_threads(1)
    log.silence_megatron_warnings()
    from rl_megatron.interfaces import metric_names as names
    from rl_megatron.losses import dpo_objective
    from rl_megatron.parallel.process import stop
    from rl_megatron.runtime.job import Job
    from rl_megatron.runtime.learning_rate import learning_rate
    from rl_megatron.runtime.tasks import build_dpo

    turns, losses = Turns(connection), []
    with Job.start(run, "dpo", {"loss": names.LOSS_DPO}) as job:
        task = build_dpo(run, job.process)
        policy, reference, batches = task.policy, task.reference, task.batches
        assert reference is not None
        objective = dpo_objective(**run.loss.model_dump(), implementation=run.kernels.losses)
        job.resume(policy, data=batches.cursor)
        turns.wait()
        for step in job.rounds(batches.num_steps):
            batch = batches.next()
            with job.phase("ref_logprobs"):
                batch = batch.with_fields(ref_logprobs=reference.logprobs(batch))
            with job.phase("update"):
                rate = learning_rate(run.optimizer, step, batches.num_steps)
                metrics = policy.train_step(batch, objective, rate)
            job.record(step, metrics)
            losses.append(metrics[names.LOSS_DPO])
            turns.done()
            turns.wait()
    connection.send(losses)
    stop()


def trl_steps(run: DPORun, connection: Connection) -> None:
    """The same by TRL."""
    torch.set_num_threads(1)
    import transformers
    from datasets import Dataset, disable_progress_bars
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    os.environ["TQDM_DISABLE"] = "1"
    turns, losses = Turns(connection), []

    class Trainer(DPOTrainer):
        """Keeps losses as they are, not rounded."""

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.detach())
            return loss

    class InTurn(TrainerCallback):
        """A step is from the end of the one before, so that all is in it."""

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.wait()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            turns.done()
            turns.wait()

    rows = Path(run.data.train.path).read_text(encoding="utf-8").splitlines()
    data = Dataset.from_list([json.loads(row) for row in rows])
    optimizer, loss = run.optimizer, run.loss
    settings = DPOConfig(
        output_dir=str(Path(run.output_dir).parent / "trl"),
        max_length=run.data.max_length,
        precompute_ref_log_probs=True,
        beta=loss.beta,
        max_steps=run.train.num_steps,
        per_device_train_batch_size=run.train.global_batch_size,
        train_sampling_strategy="sequential",
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_epsilon=optimizer.adam_eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_grad,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=run.model.path, args=settings, train_dataset=data)
    losses.clear()
    trainer.add_callback(InTurn())
    # Its lines of metrics are no part of what --json prints.
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    connection.send([float(loss) for loss in losses])


def measure(run: DPORun, ways: Sequence[Callable[[DPORun, Connection], None]]) -> list[Side]:
    """Steps of every way, in turn; each in a fresh process."""
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for way in ways:
        here, there = context.Pipe()
        process = context.Process(target=way, args=(run, there))
        process.start()
        there.close()  # So that one that fails is heard of.
        ends.append(here)
        processes.append(process)
    sides = [Side() for _ in ways]
    assert run.train.num_steps is not None
    for _ in range(run.train.num_steps):
        for side, end in zip(sides, ends, strict=True):
            end.send("your turn")
            cpu, wall = end.recv()
            side.cpu.append(cpu)
            side.wall.append(wall)
    for side, end, process in zip(sides, ends, processes, strict=True):
        end.send("your turn")
        side.losses = end.recv()
        process.join()
    return sides


def compare(size: TaskSize, steps: int) -> dict[str, Any]:
    """What `--json` prints."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder, size)
        run = make_run(folder, size, steps, cache=str(folder / "cache"))
        ours, trl = measure(run, (our_steps, trl_steps))
        padding = padded_tokens(run)
    clock = "wall" if torch.cuda.is_available() else "cpu"
    speeds = [side.steps_per_second(clock) for side in (ours, trl)]
    return {
        "size": asdict(size),
        "steps": steps,
        "clock": clock,
        "ours_steps_per_second": speeds[0],
        "trl_steps_per_second": speeds[1],
        "ratio": speeds[0] / speeds[1],
        "ratio_by_the_clock": ours.steps_per_second("wall") / trl.steps_per_second("wall"),
        "trl_tokens_per_token": padding,
        "worst_loss_difference": max(
            abs(a - b) for a, b in zip(ours.losses, trl.losses, strict=True)
        ),
        "losses": {"ours": ours.losses, "trl": trl.losses},
    }


def padded_tokens(run: DPORun) -> float:
    """Tokens of TRL's rectangles for each token of the data, over one pass."""
    source, tokenizer = run.data.train, load_tokenizer(run.model.path)
    pairs = load_preferences(source, tokenizer, run.data.max_length, "error")
    lengths = [
        len(side.prompt_ids) + len(side.response_ids)
        for pair in pairs
        for side in (pair.chosen, pair.rejected)
    ]
    width = 2 * run.train.global_batch_size
    parts = [lengths[start : start + width] for start in range(0, len(lengths), width)]
    return sum(max(part) * len(part) for part in parts) / sum(lengths)


def table(size: TaskSize, found: dict[str, Any]) -> Table:
    """For the terminal."""
    shown = Table(box=SIMPLE, title=f"DPO, {found['steps']} steps; {size}")
    for column in ("ours, steps/s", "TRL, steps/s", "ratio", "worst difference of losses"):
        shown.add_column(column, justify="right")
    shown.add_row(
        f"{found['ours_steps_per_second']:.1f}",
        f"{found['trl_steps_per_second']:.1f}",
        f"{found['ratio']:.2f}",
        f"{found['worst_loss_difference']:.1e}",
    )
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=32)
    TaskSize.add_arguments(parser, **DEFAULTS)
    parser.add_argument("--json", action="store_true", help="numbers instead of a table")
    options = vars(parser.parse_args(arguments))
    if importlib.util.find_spec("trl") is None:
        sys.exit(NOT_INSTALLED)
    size = TaskSize(**{name: options[name] for name in DEFAULTS})
    found = compare(size, options["steps"])
    if options["json"]:
        print(json.dumps(found, indent=1))
        return
    Console().print(table(size, found))


if __name__ == "__main__":
    main()
