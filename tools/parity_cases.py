"""What tools/parity.py compares: losses, and ways to split the job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_megatron.data.packing import MicroBatching
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.objective import Objective
from rl_megatron.losses import (
    dpo_objective,
    grpo_objective,
    kto_objective,
    reward_model_objective,
    sft_objective,
)
from rl_megatron.losses.aggregate import LOSS_AGG_MODES
from rl_megatron.losses.rollout_is import correct_for_rollout
from rl_megatron.parallel.layout import Layout

MAX_RESPONSE_TOKENS = 24
WHOLE = 1000


@dataclass(frozen=True)
class Case:
    """A loss with an aggregation.

    Attributes:
        loss: Its name; a column of the table.
        aggregation: Its name.
        objective: The two together.
        paired: Whether the batch is one of pairs.
        weights: Arguments of `correct_for_rollout`, if rollouts are to be weighted.
    """

    loss: str
    aggregation: str
    objective: Objective
    paired: bool = False
    weights: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Unique among the cases."""
        return f"{self.loss}, {self.aggregation}"

    def batch(self, batches: dict[bool, PackedBatch]) -> PackedBatch:
        """The batch of this case from those without and with pairs."""
        return correct_for_rollout(batches[self.paired], **self.weights)[0]


GRPO_LOSSES: dict[str, dict[str, Any]] = {
    "GRPO k3": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"},
    "GRPO k2": {
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "k2",
        # Low enough for a few tokens to reach it.
        "clip_ratio_c": 1.2,
    },
    "entropy": {"entropy_coef": 0.1},
    "GSPO": {"loss_mode": "gspo", "clip_ratio_low": 0.1, "clip_ratio_high": 0.1},
    "CISPO": {"loss_mode": "cispo"},
}
DPO_LOSSES: dict[str, dict[str, Any]] = {
    "DPO": {},
    "cDPO": {"label_smoothing": 0.1},
    "DPO+NLL": {"rpo_alpha": 0.2},
    "IPO": {"loss_type": "ipo"},
}


def _cases() -> Iterator[Case]:
    for mode in LOSS_AGG_MODES:
        common: dict[str, Any] = {
            "max_response_tokens": MAX_RESPONSE_TOKENS,
            "loss_agg_mode": mode,
        }
        for name, settings in GRPO_LOSSES.items():
            yield Case(name, mode, grpo_objective(**common, **settings))
        for kind, level in (("truncate", "token"), ("mask", "sequence")):
            weights = {"rollout_is": kind, "rollout_is_level": level}
            yield Case(f"IS {kind}", mode, grpo_objective(**common), weights=weights)
    for name, settings in DPO_LOSSES.items():
        yield Case(name, "pairs", dpo_objective(beta=0.1, **settings), paired=True)
    yield Case("KTO", "responses", kto_objective(beta=0.1, desirable_weight=1.33, kl=0.5))
    yield Case("SFT", "token-mean", sft_objective())


CASES = tuple(_cases())
# Of a model with a scalar head, which has none of the others.
SCORE_CASES = (
    Case("reward model", "pairs", reward_model_objective(), paired=True),
    Case(
        "reward model",
        "pairs, centered",
        reward_model_objective(center_rewards_coefficient=0.1),
        paired=True,
    ),
)


def _every_loss() -> Iterator[Case]:
    """Each loss under one aggregation; a loss after the other takes the next one."""
    by_loss: dict[str, list[Case]] = {}
    for case in CASES:
        by_loss.setdefault(case.loss, []).append(case)
    for index, cases in enumerate(by_loss.values()):
        yield cases[index % len(cases)]


EVERY_LOSS = tuple(_every_loss())
BALANCED = tuple(case for case in EVERY_LOSS if case.loss in ("GRPO k3", "DPO+NLL", "SFT"))
LOSSES = tuple(dict.fromkeys(case.loss for case in (*CASES, *SCORE_CASES)))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """A way to split the job; a row of the table.

    Attributes:
        title: Name of the layout.
        layout: Parallel degrees.
        micro_batching: Sequences (pairs) or tokens of a forward pass.
        model: One of MODELS.
        lonely: One sequence (pair) only: all data-parallel ranks but one have nothing.
        dtype: Of weights and activations.
        balance: With the balance loss of experts.
        backend: What holds the model.
        zero_stage: Of backend deepspeed.
    """

    title: str
    layout: Layout
    micro_batching: MicroBatching
    model: str = "dense"
    lonely: bool = False
    dtype: torch.dtype = torch.float32
    balance: bool = False
    backend: str = "megatron"
    zero_stage: int = 0

    @property
    def cases(self) -> tuple[Case, ...]:
        """All, or fewer where time is short: every loss once in bf16, where a rank is idle, and
        padded on four ranks or under ZeRO; three losses where another one stands beside them."""
        if self.model == "scores":
            return SCORE_CASES
        if self.balance:
            return BALANCED
        takes_long = self.layout.world_size == 4 or self.backend == "deepspeed"
        is_second = takes_long and not self.micro_batching.packed
        return EVERY_LOSS if self.is_bf16 or self.lonely or is_second else CASES

    @property
    def model_key(self) -> tuple[object, ...]:
        """Rows with the same have one model in common."""
        return (
            self.backend,
            self.zero_stage,
            self.layout,
            self.model,
            self.dtype,
            self.balance,
        )

    @property
    def is_bf16(self) -> bool:
        """Compared with one rank in bf16."""
        return self.dtype == torch.bfloat16

    @property
    def name(self) -> str:
        """Unique among the rows."""
        split = self.micro_batching
        size = f"{split.max_tokens_per_micro_batch} tokens"
        if split.micro_batch_size is not None:
            size = "all" if split.micro_batch_size == WHOLE else str(split.micro_batch_size)
        words = [f"{self.title}: {size} {'packed' if split.packed else 'padded'}"]
        words += ["idle rank"] * self.lonely + ["balance"] * self.balance + ["bf16"] * self.is_bf16
        return ", ".join(words)


LAYOUTS = {
    "DP2": Layout(data=2),
    "TP2": Layout(tensor=2),
    "TP2+SP": Layout(tensor=2, sequence_parallel=True),
    "PP2": Layout(pipeline=2),
    "PP2 (1+3 layers)": Layout(pipeline=2, first_stage_layers=1, last_stage_layers=3),
    "PP2xVPP2": Layout(pipeline=2, virtual=2),
    "CP2": Layout(context=2),
    "TP2xPP2": Layout(tensor=2, pipeline=2),
    "TP2xCP2": Layout(tensor=2, context=2),
    "TP2xCP2+SP": Layout(tensor=2, context=2, sequence_parallel=True),
    "DP2xCP2": Layout(data=2, context=2),
}
# Experts lie on data- or context-parallel ranks.
EXPERT_LAYOUTS = {
    "EP2": Layout(data=2, expert=2),
    "EP2, CP2": Layout(context=2, expert=2),
    "EP2xPP2": Layout(pipeline=2, data=2, expert=2),
    "EP2xTP2+SP": Layout(tensor=2, data=2, expert=2, sequence_parallel=True),
}


def sequences(number: int, packed: bool = True) -> MicroBatching:
    """So many sequences (pairs) in a micro-batch."""
    return MicroBatching(micro_batch_size=number, packed=packed)


TITLES = {"dense": "one rank", "experts": "one rank, experts", "scores": "one rank, scalar head"}
# What all others are compared with: one rank, one micro-batch, and nothing packed.
REFERENCES = tuple(
    Row(title, Layout(), sequences(WHOLE, packed=False), model, lonely, dtype)
    for model, title in TITLES.items()
    for lonely, dtype in ((False, torch.float32), (True, torch.float32), (False, torch.bfloat16))
    if model != "scores" or dtype == torch.float32
) + tuple(
    Row(
        TITLES["experts"], Layout(), sequences(WHOLE, packed=False), "experts", lonely, balance=True
    )
    for lonely in (False, True)
)


def _rows() -> Iterator[Row]:
    for number in (1, 2, WHOLE):
        yield Row("one rank", Layout(), sequences(number))
    yield Row("one rank", Layout(), sequences(1, packed=False))
    yield Row("one rank", Layout(), sequences(2, packed=False))
    yield Row("one rank", Layout(), MicroBatching(max_tokens_per_micro_batch=40))
    yield Row("one rank, experts", Layout(), sequences(1), "experts")
    for model, layouts in (("dense", LAYOUTS), ("experts", EXPERT_LAYOUTS)):
        for title, layout in layouts.items():
            yield Row(title, layout, sequences(2), model)
            yield Row(title, layout, sequences(WHOLE, packed=False), model)
            if layout.data > 1:
                yield Row(title, layout, sequences(1), model, lonely=True)
    yield from _score_rows()
    yield from _balance_rows()
    yield from _bf16_rows()
    yield from _transformers_rows()


def _score_rows() -> Iterator[Row]:
    """A scalar head in place of the other one, in float32."""
    yield Row(TITLES["scores"], Layout(), sequences(1), "scores")
    for title in ("DP2", "TP2", "TP2+SP", "PP2", "PP2xVPP2", "CP2", "TP2xPP2", "TP2xCP2+SP"):
        yield Row(f"{title}, scalar head", LAYOUTS[title], sequences(2), "scores")
    yield Row("DP2, scalar head", LAYOUTS["DP2"], sequences(1), "scores", lonely=True)
    yield Row("CP2, scalar head", LAYOUTS["CP2"], sequences(WHOLE, packed=False), "scores")


def _balance_rows() -> Iterator[Row]:
    """Where the tokens of a sequence, and the layers, lie on several ranks; and some together."""
    yield Row(TITLES["experts"], Layout(), sequences(1), "experts", balance=True)
    for title, split, lonely in (
        ("EP2", sequences(WHOLE, packed=False), False),
        ("EP2", sequences(1), True),
        ("TP2+SP", sequences(2), False),
        ("PP2xVPP2", sequences(1), False),
        ("EP2, CP2", sequences(2), False),
        ("EP2xTP2+SP", sequences(2, packed=False), False),
    ):
        layout = (LAYOUTS | EXPERT_LAYOUTS)[title]
        yield Row(f"{title}, experts", layout, split, "experts", lonely, balance=True)


def _bf16_rows() -> Iterator[Row]:
    """Some of the layouts: packed in many micro-batches, and padded in one."""
    for model, titles in (
        ("dense", ("one rank", "DP2", "TP2", "TP2+SP", "PP2", "CP2")),
        ("experts", ("EP2", "EP2xTP2+SP")),
    ):
        for title in titles:
            layout = (LAYOUTS | EXPERT_LAYOUTS).get(title, Layout())
            yield Row(title, layout, sequences(1), model, dtype=torch.bfloat16)
            if layout.world_size == 2:
                padded = sequences(WHOLE, packed=False)
                yield Row(title, layout, padded, model, dtype=torch.bfloat16)


def _transformers_rows() -> Iterator[Row]:
    """Models of transformers: in one process, and shared by the stages of ZeRO."""

    def row(
        stage: int, split: MicroBatching, model: str = "dense", ranks: int = 2, **more: Any
    ) -> Row:
        words = {"dense": "", "experts": ", experts", "scores": ", scalar head"}
        title = f"ZeRO-{stage} x{ranks}{words[model]}"
        kind = {"backend": "deepspeed", "zero_stage": stage} | more
        return Row(title, Layout(data=ranks), split, model, **kind)

    padded = sequences(WHOLE, packed=False)
    for split in (sequences(1, packed=False), padded):
        yield Row("torch", Layout(), split, backend="torch")
    for stage in (0, 1, 2, 3):
        yield row(stage, sequences(2))
        yield row(stage, padded)
        yield row(stage, sequences(1), lonely=True)
        yield row(stage, sequences(2), "scores")
    for stage in (2, 3):
        yield row(stage, sequences(2), "experts")
        yield row(stage, sequences(1), "experts", lonely=True)
    yield row(3, sequences(1), "scores", lonely=True)
    yield row(3, sequences(1, packed=False), ranks=3)
    for stage in (1, 2, 3):
        for split in (sequences(1), padded):
            yield row(stage, split, dtype=torch.bfloat16)


ROWS = tuple(_rows())


def reference_of(row: Row) -> Row:
    """What the row is compared with."""

    def key(row: Row) -> tuple[object, ...]:
        return row.model, row.lonely, row.dtype, row.balance

    return next(r for r in REFERENCES if key(r) == key(row))
