"""Memory of a rank under ZeRO: what is planned, and what a training step really takes.

    python tools/bench/zero_memory.py [--json] [--hidden 512] [--layers 8] [--allowance 500]

Each row starts its ranks anew, on the CPU, and trains a small Llama for two steps of SFT.
"measured" is the most memory that a rank held above what it had before there was a model. "plan" is
what the stages leave on a rank (Rajbhandari et al. 2020, section 5, for float32 weights): the ranks
divide what they share, and besides there is what is whole for a moment; see `plan_mib`. Last, the
first and the last row again with no more memory than the allowance: one must fail, one train.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

VOCAB_SIZE = 16384
BUCKET_ELEMENTS = 1_000_000
# Zero stage and ranks.
ROWS = ((0, 1), (0, 2), (1, 2), (2, 2), (3, 2), (1, 4), (2, 4), (3, 4))
MIB = 2**20
STATUS = Path("/proc/self/status")
# glibc keeps what is freed for itself, in pieces that the next large tensor does not fit into; with
# this it gives it back at once.
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_TRIM_THRESHOLD_": str(2**16)}


@dataclass(frozen=True)
class Row:
    """One way to share a model.

    Attributes:
        zero_stage, ranks: The way.
        plan_mib: What is planned for a rank.
        measured_mib: The most that one took.
    """

    zero_stage: int
    ranks: int
    plan_mib: float
    measured_mib: float


def plan_mib(stage: int, ranks: int, parameters: int, largest: int) -> float:
    """The most of a rank, in float32, without activations.

    Args:
        stage: Of ZeRO.
        ranks: That share.
        parameters: Of the model.
        largest: Of its largest module, which stage 3 gathers.
    """
    weights = gradients = main = stepped_with = 4 * parameters
    moments = 8 * parameters
    if stage == 0:
        # Gradients are reduced in a copy.
        return (weights + 2 * gradients + moments) / MIB
    own = (main + moments) / ranks
    buckets = 4 * 2 * BUCKET_ELEMENTS
    if stage == 3:
        own += (weights + gradients + stepped_with) / ranks
        # A module's weights and gradients are whole while it is at work.
        return (own + 2 * 4 * largest + buckets) / MIB
    update = (gradients if stage == 1 else gradients / ranks) + stepped_with / ranks
    # Afterwards gloo gathers the new weights in a copy.
    gather = weights
    return (weights + own + max(update, gather) + buckets) / MIB


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if the small allowance was enough for the last row, and not for the first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--allowance", type=int, default=500, help="MiB of a rank (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--rank-of", nargs=3, metavar=("FOLDER", "STAGE", "MIB"), help="internal")
    options = parser.parse_args(arguments)
    if options.rank_of:
        folder, stage, allowance = options.rank_of
        run_rank(Path(folder), int(stage), int(allowance))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parameters, largest = make_model(folder, options.hidden, options.layers)
        rows = [
            Row(
                stage,
                ranks,
                plan_mib(stage, ranks, parameters, largest),
                start_ranks(folder, stage, ranks) or 0.0,
            )
            for stage, ranks in ROWS
        ]
        trained = [
            start_ranks(folder, *ROWS[index], options.allowance) is not None for index in (0, -1)
        ]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        show(rows, parameters, options.allowance, trained)
    return 0 if trained == [False, True] else 1


def make_model(folder: Path, hidden: int, layers: int) -> tuple[int, int]:
    """Write a model with random weights; its parameters, and those of its largest module."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        vocab_size=VOCAB_SIZE,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model.num_parameters(), max(parameter.numel() for parameter in model.parameters())


def start_ranks(folder: Path, stage: int, ranks: int, allowance: int = 0) -> float | None:
    """MiB of the rank that takes the most; None if one of them could not train."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    job = [__file__, "--rank-of", str(folder), str(stage), str(allowance)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **GIVES_BACK, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, *job]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        # Both: torch's own allocator, and what it starts.
        if allowance and ("memory" in done.stderr or "MemoryError" in done.stderr):
            return None
        raise SystemExit(done.stderr)
    return float(done.stdout)


def run_rank(folder: Path, stage: int, allowance: int) -> None:
    """Train for two steps; the first rank prints the memory of the one that took most."""
    import torch

    from rl_megatron.backends.deepspeed import open_deepspeed
    from rl_megatron.config.deepspeed import DeepSpeedConfig
    from rl_megatron.config.optimizer import OptimizerConfig
    from rl_megatron.data.examples import Example
    from rl_megatron.data.packing import MicroBatching, pack_sft
    from rl_megatron.losses import sft_objective
    from rl_megatron.parallel.process import start_data_parallel, stop

    torch.set_num_threads(1)
    process = start_data_parallel()
    batch = pack_sft([Example(i, tuple(range(3, 9)), tuple(range(9, 25))) for i in range(8)])
    settings = {"reduce_bucket_size": BUCKET_ELEMENTS, "allgather_bucket_size": BUCKET_ELEMENTS}
    settings |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    settings |= {"stage3_max_live_parameters": BUCKET_ELEMENTS, "stage3_max_reuse_distance": 0}
    own = folder / f"zero_{os.getpid()}.json"
    own.write_text(json.dumps({"zero_optimization": settings}), encoding="utf-8")
    warm_up(folder)
    peak = Peak()
    if allowance:
        limit = int((status_mib("VmData") + allowance) * MIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    backend = open_deepspeed(
        folder,
        process,
        MicroBatching(micro_batch_size=8),
        DeepSpeedConfig(zero_stage=stage, config_path=str(own)),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(lr=1e-4),
    )
    for _ in range(2):
        backend.train_step(batch, sft_objective(), lr=1e-4)
    most = max(process.gather(peak.stop()))
    if process.is_main:
        print(most)
    stop()


def warm_up(folder: Path) -> None:
    """Import what the model needs, and run something."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rl_megatron.backends.deepspeed.package import load_deepspeed

    load_deepspeed()
    config = AutoConfig.from_pretrained(folder)
    config.update({"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1})
    small = AutoModelForCausalLM.from_config(config)
    small(torch.arange(3)[None]).logits.sum().backward()


class Peak:
    """The most memory of this process above what it has now; pages of files do not count."""

    def __init__(self) -> None:
        self._before = self._most = status_mib("RssAnon")
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def stop(self) -> float:
        """MiB."""
        self._is_over.set()
        self._watcher.join()
        return self._most - self._before

    def _watch(self) -> None:
        while not self._is_over.wait(0.002):
            self._most = max(self._most, status_mib("RssAnon"))


def status_mib(field: str) -> float:
    """A line of /proc/self/status."""
    lines = dict(line.split(":", 1) for line in STATUS.read_text(encoding="utf-8").splitlines())
    return int(lines[field].split()[0]) / 1024


def show(rows: Sequence[Row], parameters: int, allowance: int, trained: Sequence[bool]) -> None:
    """The table."""
    table = Table(title=f"MiB of a rank: {parameters / 1e6:.1f} million parameters", box=SIMPLE)
    for column in ("ZeRO stage", "ranks", "plan", "measured"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = (row.zero_stage, row.ranks, f"{row.plan_mib:.0f}", f"{row.measured_mib:.0f}")
        table.add_row(*map(str, cells))
    Console().print(table)
    for (stage, ranks), ok in zip((ROWS[0], ROWS[-1]), trained, strict=True):
        verdict = "trains" if ok else "is out of memory"
        print(f"stage {stage} on {ranks} ranks with {allowance} MiB for each: {verdict}")


if __name__ == "__main__":
    raise SystemExit(main())
