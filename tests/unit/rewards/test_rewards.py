import typing

import pytest

from rl_megatron.config.rewards import (
    AnswerTagConfig,
    FormatTagsConfig,
    LengthConfig,
    MathAnswerConfig,
    OverlongConfig,
    PythonConfig,
    RewardConfig,
    RewardModelConfig,
)
from rl_megatron.interfaces.records import Prompt, Rollout
from rl_megatron.rewards import REWARDS, build_reward


def rollout(response, prompt="q", answer="5", num_tokens=3):
    return Rollout(
        prompt=Prompt(row_id=0, token_ids=(1,), text=prompt, answer=answer),
        sample_index=0,
        response_ids=tuple(range(num_tokens)),
        rollout_logprobs=(0.0,) * num_tokens,
        finish_reason="stop",
        text=response,
        policy_version=0,
    )


def test_every_config_has_a_reward():
    variants = typing.get_args(typing.get_args(RewardConfig)[0])
    # A model reads tokens on all ranks: see runtime/reward_models.py.
    of_text = set(variants) - {RewardModelConfig}
    assert of_text == set(REWARDS), "add a line to REWARDS in rl_megatron/rewards/__init__.py"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AnswerTagConfig(name="answer_tag"), [1.0, 0.0]),
        (FormatTagsConfig(name="format_tags"), [1.0, 0.0]),
        (FormatTagsConfig(name="format_tags", think=False), [0.0, 1.0]),
        (MathAnswerConfig(name="math_answer"), [1.0, 0.0]),
        (MathAnswerConfig(name="math_answer", extract="boxed"), [0.0, 0.0]),
        (LengthConfig(name="length", min_tokens=3, penalty=0.5), [-0.5, 0.0]),
        (OverlongConfig(name="overlong", buffer_tokens=4, penalty_factor=2.0), [0.0, -1.0]),
        (PythonConfig(name="python", path="operator:concat"), None),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_config_reaches_its_function(config, expected):
    rollouts = [
        rollout("a</think><answer>5</answer>", prompt="q <think>\n", num_tokens=2),
        rollout("<answer>4</answer>", num_tokens=8),
    ]
    reward = build_reward(config, max_response_tokens=10)
    if expected is not None:
        assert reward(rollouts) == expected


def test_a_function_of_the_user_gets_prompt_response_and_answer(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def f(prompt, response, answer):\n    return (prompt, response, answer)\n")
    reward = build_reward(PythonConfig(name="python", path=f"{file}:f"), 10)
    assert reward([rollout("r", prompt="p", answer=None)]) == [("p", "r", None)]


@pytest.mark.parametrize(
    "config",
    [
        AnswerTagConfig(name="answer_tag"),
        FormatTagsConfig(name="format_tags"),
        MathAnswerConfig(name="math_answer"),
        LengthConfig(name="length", max_tokens=5),
        OverlongConfig(name="overlong", buffer_tokens=4),
    ],
    ids=lambda config: config.name,
)
def test_a_reward_says_whether_it_needs_an_answer(config):
    (value,) = build_reward(config, 10)([rollout("<answer>5</answer>", answer=None)])
    assert (value is None) == config.needs_answer
