"""What the cache of reference log-probs costs, and what it saves.

    python tools/bench/ref_cache.py [--pairs 64] [--hidden 128] [--json]

Building is all that tools/ref_cache.py build does once model and rows are loaded (digest, forward
pass, hashing, writing, checking), over the bare forward pass on the same parts of the data; the
rows that a run computes again to compare are none here. Where others keep the machine busy, the two
differ in speed by chance; `build_beside_forward` does not: of one build, what is not its forward
pass, over that. Bytes are those of all files but the manifest, in which each shard has a line.
Reading is finding the log-probs of a step's batch in the open cache, as a share of the step with
it. Build and forward pass are run in turn, and the least of each counts; of steps and readings it
is the median of all but the first. All run on one thread, on a CPU in CPU time. Steps with the
cache and without it, the reference being resident, run in a process each; memory is the most that
the process held in these steps (on a GPU: of the device). Lengths are log-normal as those of chats
are.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
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
from rl_megatron.checkpoint.ref_cache.manifest import MANIFEST_FILE  # noqa: E402
from rl_megatron.config import DPORun  # noqa: E402
from rl_megatron.interfaces.batch import PackedBatch  # noqa: E402
from rl_megatron.losses import dpo_objective  # noqa: E402
from rl_megatron.parallel.process import stop  # noqa: E402
from rl_megatron.runtime.build import start_process  # noqa: E402
from rl_megatron.runtime.reference_cache import LazyScorer, complete_cache  # noqa: E402
from rl_megatron.runtime.tasks import DPOTask, build_dpo  # noqa: E402
from tools.bench.dpo_task import TaskSize, make_run, write_task  # noqa: E402
from tools.bench.linear_logprob import status_bytes  # noqa: E402

DEFAULTS = {
    "pairs": 64,
    "batch": 8,
    "median": 400,
    "longest": 2048,
    "hidden": 128,
    "layers": 4,
    "vocab": 16384,
}


@dataclass(frozen=True)
class BuildCost:
    """What a build takes and leaves.

    Attributes:
        response_tokens: In the cache.
        file_bytes: Of shards and index.
        manifest_bytes: Of the manifest.
        bare_seconds: The forward pass on all data.
        build_seconds: The build with that in it.
        bare_wall: The same by the clock.
        build_wall: The same by the clock.
        beside: Of a build, what is not forward pass, over that.
    """

    response_tokens: int
    file_bytes: int
    manifest_bytes: int
    bare_seconds: float
    build_seconds: float
    bare_wall: float
    build_wall: float
    beside: float


@dataclass(frozen=True)
class StepCost:
    """A run with the cache or without.

    Attributes:
        seconds: Of a step, its reference log-probs included.
        wall: The same by the clock.
        reference_seconds: Of them, those for the reference log-probs.
        peak_mib: The most memory that was held.
    """

    seconds: float
    wall: float
    reference_seconds: float
    peak_mib: float


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="builds that are timed")
    parser.add_argument("--steps", type=int, default=6)
    TaskSize.add_arguments(parser, **DEFAULTS)
    parser.add_argument("--json", action="store_true", help="numbers instead of a table")
    options = vars(parser.parse_args(arguments))
    size = TaskSize(**{name: options[name] for name in DEFAULTS})
    found = measure(size, options["steps"], options["repeats"])
    if options["json"]:
        print(json.dumps({"size": asdict(size), **found}, indent=1))
        return
    Console().print(table(size, found))


def measure(size: TaskSize, steps: int, repeats: int) -> dict[str, float]:
    """All numbers, each measurement from a fresh process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder, size)
        cached = make_run(folder, size, steps, cache=str(folder / "cache"), verify_rows=0)
        uncached = make_run(folder, size, steps, precompute_ref_logprobs=False)
        build: BuildCost = in_process(measure_build, cached, repeats)
        with_cache: StepCost = in_process(measure_steps, cached)
        without: StepCost = in_process(measure_steps, uncached)
    return {
        "response_tokens": build.response_tokens,
        "build_seconds": build.build_seconds,
        "build_ratio": build.build_seconds / build.bare_seconds,
        "build_ratio_by_the_clock": build.build_wall / build.bare_wall,
        "build_beside_forward": build.beside,
        "bytes_per_token": build.file_bytes / build.response_tokens,
        "manifest_bytes": build.manifest_bytes,
        "read_seconds": with_cache.reference_seconds,
        "read_share": with_cache.reference_seconds / with_cache.seconds,
        "reference_seconds": without.reference_seconds,
        "step_seconds_with_cache": with_cache.seconds,
        "step_seconds_without": without.seconds,
        "step_wall_seconds_with_cache": with_cache.wall,
        "step_wall_seconds_without": without.wall,
        "peak_mib_with_cache": with_cache.peak_mib,
        "peak_mib_without": without.peak_mib,
    }


def in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns in a fresh process, which may start some of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


class Watched:
    """A backend, and the seconds of its forward passes."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """As the backend's."""
        result, seconds, _ = timed(lambda: self._policy.logprobs(batch))
        self.seconds += seconds
        return result


def measure_build(run: DPORun, repeats: int) -> BuildCost:
    """Forward pass and build in turn; the least of each counts."""
    task, process = start(run)  # Builds the cache once, to warm up.
    assert run.reference.cache is not None
    folder, policy = Path(run.reference.cache), task.policy
    chunks = [chunk.with_fields(paired=False) for chunk in task.batches.everything()]
    watched = Watched(policy)
    scorer = LazyScorer(lambda: watched, borrowed=True)

    def bare() -> None:
        for chunk in chunks:
            policy.logprobs(chunk)

    def build() -> int:
        cache = complete_cache(run, process, scorer, task.batches.everything)
        return cache.manifest.num_tokens

    times: list[tuple[float, ...]] = []
    for _ in range(repeats):
        _, *forward = timed(bare)
        shutil.rmtree(folder)
        tokens, *whole = timed(build)
        inside, watched.seconds = watched.seconds, 0.0
        times.append((forward[0], whole[0], forward[1], whole[1], whole[0] / inside - 1))
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    manifest = (folder / MANIFEST_FILE).stat().st_size
    stop()
    return BuildCost(tokens, size, manifest, *(min(column) for column in zip(*times, strict=True)))


def measure_steps(run: DPORun) -> StepCost:
    """Every step of the run."""
    task, _ = start(run)
    reference, policy = task.reference, task.policy
    assert reference is not None
    objective = dpo_objective(**run.loss.model_dump(), implementation=run.kernels.losses)
    forget_peak()
    columns: list[tuple[float, ...]] = []
    for _ in range(task.batches.num_steps):
        batch = task.batches.next()
        logprobs, *reading = timed(lambda batch=batch: reference.logprobs(batch))
        batch = batch.with_fields(ref_logprobs=logprobs)
        _, *update = timed(
            lambda batch=batch: policy.train_step(batch, objective, run.optimizer.lr)
        )
        columns.append((reading[0] + update[0], reading[1] + update[1], reading[0]))
    medians = [median(column) for column in zip(*columns[1:], strict=True)]
    peak = peak_bytes() / 2**20
    stop()
    return StepCost(*medians, peak)


def start(run: DPORun) -> tuple[DPOTask, Any]:
    """The run's models and data on one thread, and the process."""
    torch.set_num_threads(1)
    log.silence_megatron_warnings()
    process = start_process(run, 1)
    return build_dpo(run, process), process


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What `work` returns, CPU seconds of this process (on a GPU: seconds), and seconds."""
    on_device = torch.cuda.is_available()
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    if on_device:
        torch.cuda.synchronize()
    passed = time.perf_counter() - wall
    return result, passed if on_device else time.process_time() - cpu, passed


def forget_peak() -> None:
    """The peak of memory starts anew; not ru_maxrss, where a child begins with its parent's."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most since."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return status_bytes("VmHWM")


def table(size: TaskSize, found: dict[str, float]) -> Table:
    """For the terminal."""
    shown = Table(box=SIMPLE, title=str(size))
    for column in ("", "with cache", "without"):
        shown.add_column(column, justify="right" if column else "left")
    bytes_per_token = f"{found['bytes_per_token']:.3f} (at most 4.2)"
    shown.add_row("build / forward pass", f"{found['build_ratio']:.3f} (at most 1.05)")
    shown.add_row("bytes per response token", bytes_per_token)
    shown.add_row("reading / step", f"{found['read_share']:.3%} (at most 1 %)")
    for label, key, form in (
        ("seconds of a step", "step_seconds", "{:.3f}"),
        ("peak MiB", "peak_mib", "{:.0f}"),
    ):
        values = (found[f"{key}_with_cache"], found[f"{key}_without"])
        shown.add_row(label, *map(form.format, values))
    return shown


if __name__ == "__main__":
    main()
