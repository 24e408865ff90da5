"""What tools/parity.py compares: two checkpoints, batches, losses, and ways to split the job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

from rl_megatron.data.examples import Example, PreferencePair
from rl_megatron.data.packing import MicroBatching, pack_preferences, pack_sft
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.objective import Objective
from rl_megatron.losses import dpo_objective, grpo_objective, sft_objective
from rl_megatron.losses.aggregate import LOSS_AGG_MODES
from rl_megatron.losses.rollout_is import correct_for_rollout
from rl_megatron.parallel.layout import Layout

TEMPERATURE = 0.8
VOCAB_SIZE = 131
# 131 tokens are padded to 136 rows on one tensor-parallel rank and to 144 on two.
VOCAB_DIVISOR = 8
# One response is empty, and so is one side of a pair.
PROMPT_TOKENS = (3, 9, 1, 6, 12, 2, 5, 4)
RESPONSE_TOKENS = (7, 2, 19, 1, 5, 0, 11, 8)
MAX_RESPONSE_TOKENS = 24
WHOLE = 1000
# By name: the class of the config, and what is particular. An embedding that is the head as well
# lies on two stages of a pipeline.
MODELS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "dense": (Qwen3Config, {"tie_word_embeddings": True}),
    "experts": (
        Qwen3MoeConfig,
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
}


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
    yield Case("SFT", "token-mean", sft_objective())


CASES = tuple(_cases())


@dataclass(frozen=True)
class Row:
    """A way to split the job; a row of the table.

    Attributes:
        title: Name of the layout.
        layout: Parallel degrees.
        micro_batching: Sequences (pairs) or tokens of a forward pass.
        model: One of MODELS.
        lonely: One sequence (pair) only: all data-parallel ranks but one have nothing.
    """

    title: str
    layout: Layout
    micro_batching: MicroBatching
    model: str = "dense"
    lonely: bool = False

    @property
    def name(self) -> str:
        """Unique among the rows."""
        split = self.micro_batching
        size = f"{split.max_tokens_per_micro_batch} tokens"
        if split.micro_batch_size is not None:
            size = "all" if split.micro_batch_size == WHOLE else str(split.micro_batch_size)
        words = [f"{self.title}: {size} {'packed' if split.packed else 'padded'}"]
        return ", ".join(words + ["idle rank"] * self.lonely)


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


# What all others are compared with: one rank, one micro-batch, and nothing packed.
REFERENCES = tuple(
    Row(title, Layout(), sequences(WHOLE, packed=False), model, lonely)
    for model, title in (("dense", "one rank"), ("experts", "one rank, experts"))
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


ROWS = tuple(_rows())


def reference_of(row: Row) -> Row:
    """What the row is compared with."""
    return next(r for r in REFERENCES if (r.model, r.lonely) == (row.model, row.lonely))


def make_model(folder: Path, name: str) -> PreTrainedModel:
    """A small random model of MODELS in float32, saved in `folder`.

    Its layers are as many as two stages of two chunks need. No distribution is flat, and log-probs
    stay below 8 nats as a rule: where they are larger the next float32 is 1e-6 away, and a ratio
    can be no closer than that.
    """
    logging.disable_progress_bar()
    config_class, settings = MODELS[name]
    config = config_class(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=4,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        **settings,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_((0.1 if "embed" in name or "head" in name else 0.15) * noise)
    model.save_pretrained(folder)
    return model


def make_batches(model: PreTrainedModel) -> dict[bool, PackedBatch]:
    """The batch without and with pairs: the same sequences, and every field that a loss reads.

    Log-probs of old policy, engine and reference are those of the model and noise, so that ratios
    lie on both sides of every bound. Advantages and distances to the reference lean to one side,
    and the old policy is some way off: a mean in which everything cancels, or a divergence that is
    nearly 0, has no digits to compare. The engine leans so that the longest response keeps its
    weight where others are masked.
    """
    generator = torch.Generator().manual_seed(7)

    def ids(number: int) -> tuple[int, ...]:
        return tuple(torch.randint(VOCAB_SIZE, (number,), generator=generator).tolist())

    examples = [
        Example(row, ids(prompt), ids(response))
        for row, (prompt, response) in enumerate(zip(PROMPT_TOKENS, RESPONSE_TOKENS, strict=True))
    ]
    sides = zip(examples[0::2], examples[1::2], strict=True)
    batch = pack_sft(examples)
    logprobs = model_logprobs(model, batch)
    noise = torch.randn(4, batch.num_tokens, generator=generator)
    lean = torch.where(batch.segment_ids % 2 == 0, -0.5, 0.5)
    fields = {
        "old_logprobs": logprobs + 0.5 * noise[0],
        "rollout_logprobs": logprobs + 0.5 * noise[0] + 0.3 * noise[1] - 0.1 * lean,
        "ref_logprobs": logprobs + 0.3 * noise[2] + lean,
        "advantages": 1 + noise[3],
    }
    pairs = pack_preferences([PreferencePair(i, *pair) for i, pair in enumerate(sides)])
    return {False: batch.with_fields(**fields), True: pairs.with_fields(**fields)}


@torch.no_grad()
def model_logprobs(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """[T] log-prob of each token at TEMPERATURE, 0 on first tokens; by transformers."""
    values = []
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        rows = (model(tokens[None]).logits[0, :-1] / TEMPERATURE).log_softmax(dim=1)
        values += [rows.new_zeros(1), rows.gather(1, tokens[1:, None])[:, 0]]
    return torch.cat(values)


def lonely(batches: dict[bool, PackedBatch]) -> dict[bool, PackedBatch]:
    """The sequence with the longest response, and its pair, alone."""
    return {False: batches[False].select([2]), True: batches[True].select([2, 3])}
