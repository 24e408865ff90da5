"""What packing saves: tokens that are computed, and the time of a step, packed against padded.

    python tools/bench/packing.py [--json]

Lengths are log-normal as those of chats are: median 400, at most 4096, and micro-batches of 8192
tokens, each one pass. Real are the tokens of sequences; computed are all that go through the
layers: padding, the tails that a layout needs to divide, and empty micro-batches too. The share is
that of real among computed tokens; "of budget" among those that the micro-batches could hold, and
"of blocks" among those of the right-padded blocks that attention is computed in where no kernel
takes unequal lengths. Padded micro-batches hold two sequences, which is what 8192 tokens are sure
to hold. The step is one of SFT on one rank and one CPU thread, of a small model, lengths and budget
being a sixteenth as long.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rl_megatron import log  # noqa: E402
from rl_megatron.config.optimizer import OptimizerConfig  # noqa: E402
from rl_megatron.data.examples import Example  # noqa: E402
from rl_megatron.data.packing import MicroBatching, pack_sft, plan_micro_batches  # noqa: E402
from rl_megatron.losses import sft_objective  # noqa: E402
from rl_megatron.models.families import read_shape, weight_rules  # noqa: E402
from rl_megatron.models.spans import find_spans, make_blocks  # noqa: E402
from rl_megatron.parallel.layout import Layout  # noqa: E402
from rl_megatron.parallel.process import start_megatron, stop  # noqa: E402

MEDIAN, SIGMA, LONGEST, BUDGET = 400, 0.9, 4096, 8192
SEQUENCES = 1024
LAYOUTS = {
    "one rank": Layout(),
    "DP8": Layout(data=8),
    "TP4+SP x CP2": Layout(tensor=4, context=2, sequence_parallel=True),
    "PP4 x VPP2": Layout(pipeline=4, virtual=2),
}
PACKED = MicroBatching(max_tokens_per_micro_batch=BUDGET)
PADDED = MicroBatching(micro_batch_size=BUDGET // LONGEST, packed=False)
# For the step.
SCALE, STEP_SEQUENCES, REPEATS, VOCAB_SIZE = 16, 96, 2, 512
STEPS = {
    "packed": MicroBatching(max_tokens_per_micro_batch=BUDGET // SCALE),
    "padded, 2 each": PADDED,
    "padded, 8 each": MicroBatching(micro_batch_size=8, packed=False),
}


@dataclass(frozen=True)
class Efficiency:
    """Tokens of a batch under a layout.

    Attributes:
        layout: Its name.
        way: packed or padded.
        micro_batches: On all data-parallel ranks together.
        real: Tokens of sequences.
        computed: Tokens that go through the layers.
        attended: Tokens that go through attention where it is computed in right-padded blocks,
            which a kernel for variable lengths does without.
    """

    layout: str
    way: str
    micro_batches: int
    real: int
    computed: int
    attended: int

    @property
    def share(self) -> float:
        """Of computed tokens, those that are real."""
        return self.real / self.computed


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and what it computes."""

    way: str
    micro_batches: int
    real: int
    computed: int
    seconds: float


def draw_lengths(number: int, scale: int = 1, seed: int = 0) -> list[int]:
    """Lengths of sequences, divided by `scale`; what would be longer is cut."""
    generator = random.Random(seed)
    drawn = (generator.lognormvariate(math.log(MEDIAN / scale), SIGMA) for _ in range(number))
    return [min(LONGEST // scale, max(2, round(length))) for length in drawn]


def plan(lengths: Sequence[int], micro_batching: MicroBatching, layout: Layout) -> list[list[int]]:
    """Lengths of the sequences as each micro-batch of the job lays them out, padding included."""
    multiple = layout.micro_batch_multiple
    ranks = plan_micro_batches(lengths, False, layout.data, micro_batching, multiple)
    found = [[lengths[i] for i in members] for rank in ranks for members in rank]
    if micro_batching.packed:
        return found
    return [[max(members)] * len(members) if members else [] for members in found]


def measure_efficiency(
    lengths: Sequence[int], name: str, way: str, micro_batching: MicroBatching
) -> Efficiency:
    """What the layout `name` computes of the sequences."""
    layout = LAYOUTS[name]
    planned = plan(lengths, micro_batching, layout)
    computed = attended = 0
    for members in planned:
        tail = layout.tail(sum(members))
        bounds = list(accumulate([*members, tail], initial=0))
        blocks, _ = make_blocks(find_spans(bounds, [(0, 0, bounds[-1])]), torch.device("cpu"))
        computed += bounds[-1]
        attended += sum(block.query.numel() for block in blocks)
    return Efficiency(name, way, len(planned), sum(lengths), computed, attended)


def measure_steps() -> list[StepTime]:
    """Each way of STEPS, in one process on one model."""
    log.silence_megatron_warnings()
    # Importing Megatron takes seconds.
    from rl_megatron.backends.megatron import MegatronBackend
    from rl_megatron.models.gpt import build_model

    torch.set_num_threads(1)
    process = start_megatron(Layout(), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        _model_config().save_pretrained(folder)
        shape = read_shape(Path(folder))
    chunks = build_model(shape, process, torch.float32, VOCAB_SIZE)
    rules = weight_rules(shape, VOCAB_SIZE)
    backend = MegatronBackend(chunks, rules, process, PADDED, OptimizerConfig())
    lengths = draw_lengths(STEP_SEQUENCES, SCALE)
    batch = pack_sft(
        [Example(i, (1,) * (n // 2), (2,) * (n - n // 2)) for i, n in enumerate(lengths)]
    )
    found = []
    for way, micro_batching in STEPS.items():
        backend.micro_batching = micro_batching
        planned = plan(lengths, micro_batching, Layout())
        best = math.inf
        for _ in range(1 + REPEATS):  # The first is to warm up, and the best one counts.
            start = time.perf_counter()
            backend.train_step(batch, sft_objective(), lr=0.0)
            best = min(best, time.perf_counter() - start)
        computed = sum(map(sum, planned))
        found.append(StepTime(way, len(planned), sum(lengths), computed, best))
    stop()
    return found


def _model_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=4,
        hidden_size=256,
        intermediate_size=768,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
    )


def efficiency_table(rows: Sequence[Efficiency]) -> Table:
    """For the terminal."""
    table = Table(
        box=SIMPLE, title=f"{SEQUENCES} sequences, median {MEDIAN}, at most {LONGEST} tokens"
    )
    columns = ("layout", "way", "passes", "real", "computed", "share", "of budget")
    for index, column in enumerate((*columns, "of blocks")):
        table.add_column(column, justify="left" if index < 2 else "right")
    for row in rows:
        table.add_row(
            row.layout,
            row.way,
            str(row.micro_batches),
            f"{row.real:,}",
            f"{row.computed:,}",
            f"{row.share:.2%}",
            f"{row.real / (row.micro_batches * BUDGET):.1%}",
            f"{row.real / row.attended:.1%}",
        )
    return table


def step_table(rows: Sequence[StepTime]) -> Table:
    """For the terminal."""
    table = Table(
        box=SIMPLE, title=f"A step on {STEP_SEQUENCES} sequences, lengths and budget / {SCALE}"
    )
    for column in ("way", "passes", "real", "computed", "seconds", "real tokens/s"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for row in rows:
        table.add_row(
            row.way,
            str(row.micro_batches),
            f"{row.real:,}",
            f"{row.computed:,}",
            f"{row.seconds:.2f}",
            f"{row.real / row.seconds:,.0f}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="numbers instead of tables")
    options = parser.parse_args(arguments)
    lengths = draw_lengths(SEQUENCES)
    efficiency = [measure_efficiency(lengths, name, "packed", PACKED) for name in LAYOUTS]
    efficiency.append(measure_efficiency(lengths, "one rank", "padded", PADDED))
    steps = measure_steps()
    if options.json:
        shares = [asdict(row) | {"real_share": row.share} for row in efficiency]
        print(json.dumps({"efficiency": shares, "steps": [asdict(row) for row in steps]}, indent=1))
        return
    console = Console()
    console.print(efficiency_table(efficiency))
    console.print(step_table(steps))


if __name__ == "__main__":
    main()
