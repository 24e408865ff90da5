"""How long a checkpoint keeps training waiting: written at once, and in the background.

    python tools/bench/checkpoint_save.py [--json] [--hidden 1024] [--layers 8]

One rank, SFT steps of a small Llama, a checkpoint and a step in each of a few rounds. "waits" is
what the save itself takes from the loop; "share" is of the wait of the save at once; "step" is the
step after it, which in the background shares the machine with the writer, and waits before it
updates what has not been read yet; "until durable" is when the checkpoint counts. Loading is timed
too. The first saves of a process, which plan who writes what, are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rl_megatron import log  # noqa: E402
from rl_megatron.checkpoint.publish import NewCheckpoint, iteration_folder  # noqa: E402
from rl_megatron.config.optimizer import OptimizerConfig  # noqa: E402
from rl_megatron.data.examples import Example  # noqa: E402
from rl_megatron.data.packing import MicroBatching, pack_sft  # noqa: E402
from rl_megatron.interfaces.batch import PackedBatch  # noqa: E402
from rl_megatron.interfaces.protocols import PolicyBackend  # noqa: E402
from rl_megatron.losses import sft_objective  # noqa: E402
from rl_megatron.models.families import read_shape, weight_rules  # noqa: E402
from rl_megatron.parallel.layout import Layout  # noqa: E402
from rl_megatron.parallel.process import Process, start_megatron, stop  # noqa: E402

VOCAB_SIZE, WARM_UP, ROUNDS = 8192, 3, 5


@dataclass(frozen=True)
class Row:
    """One way to save.

    Attributes:
        way: at once, or in the background.
        waits_seconds: What a save takes from the loop, median.
        share: Of the wait at once.
        step_seconds: The step after it, median.
        durable_seconds: From its start until it is published, median; training goes on beside it.
        load_seconds: To read it back.
        mebibytes: On disk.
    """

    way: str
    waits_seconds: float
    share: float
    step_seconds: float
    durable_seconds: float
    load_seconds: float
    mebibytes: float


def make_backend(folder: Path, process: Process) -> PolicyBackend:
    """A model with new weights and an optimizer that has made a step."""
    from rl_megatron.backends.megatron import MegatronBackend
    from rl_megatron.models.gpt import build_model

    shape = read_shape(folder)
    chunks = build_model(shape, process, torch.float32, 8)
    rules = weight_rules(shape, 8)
    backend = MegatronBackend(
        chunks, rules, process, MicroBatching(micro_batch_size=8), OptimizerConfig(lr=1e-4)
    )
    step(backend)
    return backend


def step(backend: PolicyBackend) -> None:
    """One step of SFT."""
    backend.train_step(make_batch(), sft_objective(), lr=1e-4)


def make_batch() -> PackedBatch:
    """Eight short rows."""
    return pack_sft([Example(i, tuple(range(3, 9)), tuple(range(9, 25))) for i in range(8)])


def measure(
    backend: PolicyBackend, process: Process, root: Path, background: bool
) -> tuple[float, float, float]:
    """Seconds that saves take from the loop, of the step after, and until they are published."""
    waits, steps, durable = [], [], []
    for number in range(WARM_UP + ROUNDS):
        began = time.perf_counter()
        new = NewCheckpoint(root, number, process)
        save = backend.save(new.aside, background=background)
        if not background:
            new.publish(keep_last=1)
        waits.append(time.perf_counter() - began)
        durable.append(waits[-1])
        step_began = time.perf_counter()
        step(backend)
        steps.append(time.perf_counter() - step_began)
        if background:
            while not save.is_done():
                step(backend)
            end_began = time.perf_counter()
            save.finish()
            new.publish(keep_last=1)
            waits[-1] += time.perf_counter() - end_began
            durable[-1] = time.perf_counter() - began
    return (
        statistics.median(waits[WARM_UP:]),
        statistics.median(steps[WARM_UP:]),
        statistics.median(durable[WARM_UP:]),
    )


def load(backend: PolicyBackend, root: Path) -> float:
    """Seconds to read the last checkpoint."""
    began = time.perf_counter()
    backend.load(iteration_folder(root, WARM_UP + ROUNDS - 1))
    return time.perf_counter() - began


def run(folder: Path, hidden: int, layers: int) -> list[Row]:
    """All rows."""
    LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCAB_SIZE,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    process = start_megatron(Layout(), seed=0)
    backend = make_backend(folder, process)
    rows: list[Row] = []
    for background in (False, True):
        root = folder / f"{background}"
        waits, after, durable = measure(backend, process, root, background)
        rows.append(
            Row(
                way="background" if background else "at once",
                waits_seconds=waits,
                share=waits / (rows[0].waits_seconds if rows else waits),
                step_seconds=after,
                durable_seconds=durable,
                load_seconds=load(backend, root),
                mebibytes=sum(p.stat().st_size for p in root.rglob("*") if p.is_file()) / 2**20,
            )
        )
    backend.close()
    return rows


def print_table(rows: Sequence[Row]) -> None:
    """For people."""
    table = Table(box=SIMPLE, title="A checkpoint, and what training waits for it")
    for name in ("written", "waits", "share", "step", "until durable", "load", ""):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.way,
            f"{row.waits_seconds * 1e3:.0f} ms",
            f"{row.share:.1%}",
            f"{row.step_seconds:.2f} s",
            f"{row.durable_seconds:.2f} s",
            f"{row.load_seconds:.2f} s",
            f"{row.mebibytes:.0f} MiB",
        )
    Console().print(table)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print rows of JSON")
    options = parser.parse_args()
    log.silence_megatron_warnings()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        rows = run(Path(folder), options.hidden, options.layers)
    stop()
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
