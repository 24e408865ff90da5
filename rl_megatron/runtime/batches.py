"""Mini-batches of a run's data, and its held-out rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rl_megatron.config.data import DataSource, JudgedSource, PairSource
from rl_megatron.config.preference_runs import DPORun, KTORun
from rl_megatron.config.runs import RewardModelRun, RunBase, SFTRun, StepRunBase
from rl_megatron.data.examples import Example, JudgedExample, PreferencePair
from rl_megatron.data.packing import pack_judged, pack_preferences, pack_sft
from rl_megatron.data.preferences import load_preferences
from rl_megatron.data.sampler import PositionSampler, RowCursor, data_digest
from rl_megatron.data.sft import load_sft
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.data.unpaired import borrow_responses, load_unpaired
from rl_megatron.interfaces.batch import JudgedBatch, PackedBatch
from rl_megatron.parallel.process import Process

Row = TypeVar("Row", Example, PreferencePair, JudgedExample)
Batch = TypeVar("Batch", PackedBatch, JudgedBatch)

# Of a part of the data that is scored together, for each data-parallel rank.
_ROWS_PER_RANK = 128


@dataclass(frozen=True)
class Batches(Generic[Batch]):
    """Mini-batches of a data set, one for each optimiser step.

    Attributes:
        num_steps: Steps of the run.
        cursor: How far the run is in the rows.
        next: The batch of the next step.
        held_out: All held-out rows of each set, by name; one that has none is called "".
        everything: All rows, held-out ones too, in parts of moderate size.
    """

    num_steps: int
    cursor: RowCursor
    next: Callable[[], Batch]
    held_out: Mapping[str, Batch]
    everything: Callable[[], Iterator[Batch]]


def sft_batches(run: SFTRun, process: Process, tokenizer: Tokenizer) -> Batches[PackedBatch]:
    """Prompts with the responses to imitate."""

    def load(source: DataSource, setting: str) -> list[Example]:
        data = run.data
        return load_sft(source, tokenizer, data.max_length, data.overlong, setting)

    return _make(run, load, pack_sft, process)


def pair_batches(
    run: RewardModelRun | DPORun, process: Process, tokenizer: Tokenizer
) -> Batches[PackedBatch]:
    """Preference pairs, with margins where the run names a field for them."""

    def load(source: DataSource, setting: str) -> list[PreferencePair]:
        data = run.data
        margin_key = source.margin_key if isinstance(source, PairSource) else None
        return load_preferences(
            source, tokenizer, data.max_length, data.overlong, setting, margin_key
        )

    return _make(run, load, pack_preferences, process)


def judged_batches(run: KTORun, process: Process, tokenizer: Tokenizer) -> Batches[JudgedBatch]:
    """Responses with verdicts, and with responses of other rows where the loss measures a KL."""

    def load(source: DataSource, setting: str) -> list[JudgedExample]:
        assert isinstance(source, JudgedSource), "a run of KTO has no other"
        data = run.data
        rows = load_unpaired(source, tokenizer, data.max_length, data.overlong, setting)
        if run.loss.loss_type == "apo_zero_unpaired":
            return rows
        return borrow_responses(rows, data.max_length, setting)

    return _make(run, load, pack_judged, process)


def all_parts(batches: Batches[JudgedBatch]) -> Callable[[], Iterator[PackedBatch]]:
    """Rows and mismatched responses alike, for a reference."""
    return lambda: (part for batch in batches.everything() for part in batch.parts)


def row_cursor(run: RunBase, rows: Sequence[object]) -> RowCursor:
    """Where the run stands in its rows, in the order of its seed."""
    order = PositionSampler(len(rows), run.seed, run.data.shuffle)
    return RowCursor(order, data_digest(rows), run.checkpoint.allows("data.train"))


def _make(
    run: StepRunBase,
    load: Callable[[DataSource, str], list[Row]],
    pack: Callable[[list[Row]], Batch],
    process: Process,
) -> Batches[Batch]:
    rows = load(run.data.train, "data.train")
    size = run.train.global_batch_size
    cursor = row_cursor(run, rows)
    num_steps = run.train.num_steps
    if num_steps is None:
        assert run.train.num_epochs is not None
        num_steps = math.ceil(len(rows) * run.train.num_epochs / size)
    held_out = {
        name: load(source, f"data.eval.{name}".rstrip("."))
        for name, source in run.data.held_out.items()
    }
    part = _ROWS_PER_RANK * process.layout.data

    def everything() -> Iterator[Batch]:
        for some in (rows, *held_out.values()):
            for start in range(0, len(some), part):
                yield pack(some[start : start + part])

    return Batches(
        num_steps=num_steps,
        cursor=cursor,
        next=lambda: pack([rows[i] for i in cursor.take(size)]),
        held_out={name: pack(some) for name, some in held_out.items()},
        everything=everything,
    )
