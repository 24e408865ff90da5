"""Reward models: built to be trained, or frozen as a reward of GRPO."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rl_megatron.config.rewards import RewardModelConfig
from rl_megatron.config.runs import RewardModelRun, RunBase
from rl_megatron.data.packing import MicroBatching, pack_rollouts
from rl_megatron.data.tokenizer import (
    Tokenizer,
    check_same_tokens,
    check_vocabulary,
    load_tokenizer,
)
from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces.protocols import RewardBackend, RewardScorer
from rl_megatron.interfaces.records import Rollout
from rl_megatron.models.fresh_head import SCORE, fresh_head
from rl_megatron.parallel.process import Process
from rl_megatron.rewards import BatchReward
from rl_megatron.runtime.build import ModelSource, build_backend, open_model

logger = logging.getLogger(__name__)


def build_reward_model(
    run: RewardModelRun, process: Process, micro_batching: MicroBatching
) -> RewardBackend:
    """The model of `model.path`, ready to score and to step: a language model gets a new head."""
    source = open_model(run.model.path, "model.path", run.backend)
    if not source.shape.scalar_head:
        head = fresh_head(source.shape, run.seed)
        logger.info("%s has no %s: it begins with a random one", source.named, SCORE)
        source = replace(source, shape=replace(source.shape, scalar_head=True), head=head)
    backend: RewardBackend = build_backend(run, process, micro_batching, source, 1.0, True)
    return backend


class RewardModels:
    """The reward models that score the rollouts of a run, each held once.

    Args:
        run: The run.
        process: This rank.
        micro_batching: Of the run: a reward model lies on the same ranks as the policy.
        tokenizer: The policy's.
    """

    def __init__(
        self, run: RunBase, process: Process, micro_batching: MicroBatching, tokenizer: Tokenizer
    ) -> None:
        self._run = run
        self._process = process
        self._micro_batching = micro_batching
        self._tokenizer = tokenizer
        self._held: dict[str, RewardScorer] = {}

    def load(self, config: RewardModelConfig, setting: str) -> BatchReward:
        """The reward of a model. Called by all ranks together, as is what it returns.

        Args:
            config: Its settings.
            setting: Key of its path, for messages.

        Raises:
            CheckpointError: It is no reward model.
            DataError: Its tokens are not the policy's.
        """
        path = str(Path(config.path))
        if path not in self._held:
            source = self._open(config.path, setting)
            self._held[path] = build_backend(
                self._run, self._process, self._micro_batching, source, 1.0, False
            )
        model = self._held[path]

        def values(rollouts: Sequence[Rollout]) -> Sequence[object]:
            return model.scores(pack_rollouts(rollouts)).tolist()

        return values

    def _open(self, path: str, setting: str) -> ModelSource:
        source = open_model(path, setting, self._run.backend)
        if not source.shape.scalar_head:
            raise CheckpointError(
                f"{source.named} is a language model without a {SCORE}; make a reward model of it "
                "with recipes/reward_model, and name its checkpoint"
            )
        check_same_tokens(self._tokenizer, load_tokenizer(source.folder.hf), source.named)
        check_vocabulary(self._tokenizer, source.shape.vocab_size)
        return source
