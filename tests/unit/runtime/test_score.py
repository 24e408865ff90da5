import numpy as np
import pytest
import torch

from rl_megatron.config.rewards import AnswerTagConfig, LengthConfig, PythonConfig
from rl_megatron.errors import RolloutError
from rl_megatron.interfaces.records import Prompt, Rollout
from rl_megatron.runtime.score import NamedReward, build_rewards, score


def rollouts(*texts):
    prompt = Prompt(row_id=17, token_ids=(1,), text="2+3=", answer="5")
    return [
        Rollout(prompt, index, (1,) * len(text), (0.0,) * len(text), "stop", text, 0)
        for index, text in enumerate(texts)
    ]


def given(name, *values, weight=1.0):
    return NamedReward(name, weight, lambda rollouts: values)


def test_rw_07_none_is_left_out_of_sums_and_means():
    scores = score(rollouts(*"abcd"), [given("a", 1, 0, None, 1), given("b", *[None] * 4)])
    assert scores.rewards == (1.0, 0.0, None, 1.0)
    assert scores.num_unscored == 1
    assert scores.by_name == {"a": (1.0, 0.0, None, 1.0), "b": (None,) * 4}
    assert scores.means == {"a": pytest.approx(2 / 3, abs=1e-15)}


def test_weights_and_what_is_there():
    a = given("a", 1.0, 1.0, None, None, weight=1.0)
    b = given("b", 3.0, None, 3.0, None, weight=0.5)
    assert score(rollouts(*"abcd"), [a, b]).rewards == (2.5, 1.0, 1.5, None)


def test_weight_zero_only_records():
    a = given("a", 1.0, None)
    b = given("b", 5.0, 5.0, weight=0.0)
    scores = score(rollouts(*"ab"), [a, b])
    assert scores.rewards == (1.0, None)
    assert scores.means == {"a": 1.0, "b": 5.0}


def test_numbers_of_other_libraries_are_numbers():
    values = (True, np.float32(0.5), np.int64(2), np.array(1.5), torch.tensor(0.25))
    scores = score(rollouts(*"abcde"), [given("a", *values)])
    assert scores.rewards == (1.0, 0.5, 2.0, 1.5, 0.25)
    assert all(type(value) is float for value in scores.rewards)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([0.5, 0.5], r"\[0.5, 0.5\] \(list\)"),
        (np.zeros(2), r"\(ndarray of shape \[2\]\)"),
        (torch.zeros(1), r"\(Tensor of shape \[1\]\)"),
        ("1.0", r"'1.0' \(str\)"),
        (1j, "complex"),
        (float("nan"), "nan, which is not finite"),
        (torch.tensor(float("inf")), "inf.*not finite"),
    ],
)
def test_anything_but_a_finite_number_stops_the_run(value, said):
    with pytest.raises(RolloutError, match=rf"rewards.mine: row 17, sample 1: .*{said}"):
        score(rollouts(*"ab"), [given("mine", 1.0, value)])


def test_rewards_from_their_configs(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def polite(prompt, response, answer):\n    return None\n")
    rewards = build_rewards(
        [
            AnswerTagConfig(name="answer_tag"),
            LengthConfig(name="length", max_tokens=20, weight=0.5),
            PythonConfig(name="python", path=f"{file}:polite"),
        ],
        max_response_tokens=30,
    )
    assert [r.name for r in rewards] == ["answer_tag", "length", "polite"]
    scores = score(rollouts("<answer>5</answer>", "<answer>5</answer>....."), rewards)
    assert scores.rewards == (1.0, 0.5)
    assert scores.means == {"answer_tag": 1.0, "length": -0.5}
