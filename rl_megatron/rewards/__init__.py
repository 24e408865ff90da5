"""Rewards: functions of text (and of length) that score one response.

A new reward is a file here, a config class in rl_megatron/config/rewards.py and a line in REWARDS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rl_megatron.config.rewards import (
    AnswerTagConfig,
    FormatTagsConfig,
    LengthConfig,
    MathAnswerConfig,
    OverlongConfig,
    PythonConfig,
    RewardBase,
)
from rl_megatron.interfaces.records import Rollout
from rl_megatron.rewards.answer_tag import answer_tag
from rl_megatron.rewards.extract import with_prefill
from rl_megatron.rewards.format_tags import format_tags
from rl_megatron.rewards.length import length, overlong
from rl_megatron.rewards.math_answer import math_answers
from rl_megatron.rewards.python_function import UserReward, load_function

BatchReward = Callable[[Sequence[Rollout]], Sequence[object]]
"""The value of each rollout. Whether each is a number or None is checked where they are added."""


def _of_text(reward: UserReward) -> BatchReward:
    return lambda rollouts: [reward(r.prompt.text, r.text, r.prompt.answer) for r in rollouts]


def _of_length(reward: Callable[[int], float]) -> BatchReward:
    return lambda rollouts: [reward(len(r.response_ids)) for r in rollouts]


def _math_answer(config: MathAnswerConfig, max_response_tokens: int) -> BatchReward:
    return lambda rollouts: math_answers(
        [with_prefill(r.prompt.text, r.text) for r in rollouts],
        [r.prompt.answer for r in rollouts],
        where=config.extract,
        timeout_seconds=config.timeout_seconds,
    )


def _length(config: LengthConfig, max_response_tokens: int) -> BatchReward:
    return _of_length(
        partial(
            length,
            min_tokens=config.min_tokens,
            max_tokens=config.max_tokens,
            penalty=config.penalty,
        )
    )


def _overlong(config: OverlongConfig, max_response_tokens: int) -> BatchReward:
    return _of_length(
        partial(
            overlong,
            max_response_tokens=max_response_tokens,
            buffer_tokens=config.buffer_tokens,
            penalty_factor=config.penalty_factor,
        )
    )


# Config class -> builder(config, max_response_tokens).
REWARDS: dict[type[RewardBase], Callable[[Any, int], BatchReward]] = {
    MathAnswerConfig: _math_answer,
    AnswerTagConfig: lambda config, _: _of_text(answer_tag),
    FormatTagsConfig: lambda config, _: _of_text(partial(format_tags, think=config.think)),
    LengthConfig: _length,
    OverlongConfig: _overlong,
    PythonConfig: lambda config, _: _of_text(load_function(config.path)),
}


def build_reward(config: RewardBase, max_response_tokens: int) -> BatchReward:
    """The reward that a config asks for."""
    return REWARDS[type(config)](config, max_response_tokens)
