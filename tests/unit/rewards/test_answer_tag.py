import pytest

from rl_megatron.rewards.answer_tag import answer_tag


@pytest.mark.parametrize(
    ("prompt", "response", "reward"),
    [
        ("q", "<think>a</think>\n<answer>5</answer>", 1),
        ("q <think>\n", "a</think>\n<answer>5</answer>", 1),
        ("q", r"<think>a</think><answer>\boxed{5}</answer>", 1),
        ("q", "<think>a</think><answer>4</answer><answer>5</answer>", 0),
        ("q", "<think>a<answer>5</answer></think>", 0),
        ("q <answer>", "5</answer>", 1),
        ("q <answer>5</answer>", "no idea", 0),  # nothing that the prompt says earns credit
        ("q", "<answer>55</answer>", 0),
        ("q", "<answer>5.0</answer>", 0),  # letter by letter
        ("q", "5", 0),
    ],
)
def test_rw_06_value_in_the_tag(prompt, response, reward):
    assert answer_tag(prompt, response, "5") == reward


def test_space_around_the_text_does_not_count():
    assert answer_tag("q", "<answer> new york\n</answer>", " new york") == 1


def test_without_a_known_answer_there_is_no_reward():
    assert answer_tag("q", "<answer>5</answer>", None) is None
