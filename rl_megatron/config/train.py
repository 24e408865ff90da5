"""How long a run is, how large a step is, and how often things are written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import NonNegativeInt, PositiveInt, model_validator

from rl_megatron.config.base import Problem, Strict

DEFAULT_TOKENS_PER_MICRO_BATCH = 8192


class TrainBase(Strict):
    """What every kind of training has. Micro-batches decide memory and speed, never a number."""

    micro_batch_size: PositiveInt | None = None
    """Sequences (DPO, reward model: pairs) of one forward pass on one rank."""

    max_tokens_per_micro_batch: PositiveInt | None = None
    """Or: tokens of one forward pass on one rank; 8192 if neither is set."""

    save_interval: NonNegativeInt = 0
    """Steps (GRPO: rollout batches) between checkpoints; 0: only at the end."""

    eval_interval: NonNegativeInt = 0
    """Steps (GRPO: rollout batches) between evaluations; 0: only at the end."""

    log_interval: PositiveInt = 1
    """Steps (GRPO: rollout batches) between lines of metrics."""

    packed: bool = True
    """Lay sequences end to end. false: pad each to the longest of its micro-batch, which gives the
    same numbers and computes more."""

    @model_validator(mode="before")
    @classmethod
    def _budget_in_tokens_by_default(cls, data: Any) -> Any:
        keys = ("micro_batch_size", "max_tokens_per_micro_batch")
        if isinstance(data, dict) and all(data.get(key) is None for key in keys):
            return {**data, "max_tokens_per_micro_batch": DEFAULT_TOKENS_PER_MICRO_BATCH}
        return data

    def problems(self) -> Iterable[Problem]:
        """Two sizes for one micro-batch, or one that padding would exceed."""
        if not self.packed and self.micro_batch_size is None:
            yield Problem(
                "packed",
                False,
                "padding would exceed a budget in tokens; set train.micro_batch_size",
                others=("micro_batch_size",),
            )
        if self.micro_batch_size is not None and self.max_tokens_per_micro_batch is not None:
            yield Problem(
                "micro_batch_size",
                self.micro_batch_size,
                "train.max_tokens_per_micro_batch "
                f"({self.max_tokens_per_micro_batch}) is set too; set one of the two to null",
                others=("max_tokens_per_micro_batch",),
            )


class StepTrainConfig(TrainBase):
    """Training counted in optimiser steps: SFT, reward models and DPO."""

    num_steps: PositiveInt | None = None
    """Optimiser steps of the run; set this or `num_epochs`."""

    num_epochs: PositiveInt | None = None
    """Passes over the data; set this or `num_steps`."""

    global_batch_size: PositiveInt = 32
    """Rows (DPO, reward model: pairs) of one optimiser step over all ranks."""

    def problems(self) -> Iterable[Problem]:
        """A run with no length, or with two."""
        yield from super().problems()
        if self.num_steps is None and self.num_epochs is None:
            yield Problem(
                "num_steps",
                None,
                "the length of the run is not set; set train.num_steps or train.num_epochs",
                others=("num_epochs",),
            )
        if self.num_steps is not None and self.num_epochs is not None:
            yield Problem(
                "num_steps",
                self.num_steps,
                f"train.num_epochs ({self.num_epochs}) is set too; set one of the two to null",
                others=("num_epochs",),
            )


class GRPOTrainConfig(TrainBase):
    """Training counted in rollout batches: GRPO."""

    num_rollout_batches: PositiveInt
    """Rollout batches of the run."""

    ppo_epochs: PositiveInt = 1
    """Passes over each rollout batch."""

    mini_batch_size: PositiveInt | None = None
    """Sequences of one optimiser step over all ranks; null: the whole rollout batch."""
