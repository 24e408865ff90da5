import pytest

from rl_megatron.rewards.format_tags import format_tags


@pytest.mark.parametrize(
    ("prompt", "response", "reward"),
    [
        ("q", "<think>a</think>\n<answer>5</answer>", 1),
        ("q", "<think>a</think><think>b</think><answer>5</answer>", 0),
        ("q", "<think>a</think><answer>4</answer><answer>5</answer>", 0),
        ("q <think>\n", "a</think>\n<answer>5</answer>", 1),
        ("q", "<answer>5</answer>", 0),
        ("q", "<think></think><answer></answer>", 0),
        ("q", "<think>a<answer>5</answer></think>", 0),
        ("q", r"<think>a</think><answer>\boxed{5}</answer>", 1),
    ],
)
def test_rw_06_one_block_of_each(prompt, response, reward):
    assert format_tags(prompt, response) == reward


@pytest.mark.parametrize(
    ("prompt", "response"),
    [
        ("q <think>\n", "<think>a</think><answer>5</answer>"),  # opened twice
        ("q", "a</think>\n<answer>5</answer>"),  # never opened
        ("q", "well <think>a</think><answer>5</answer>"),
        ("q", "<think>a</think><answer>5</answer> bye"),
        ("q", "<think>a</think> so <answer>5</answer>"),
        ("q", "<think> \n</think><answer>5</answer>"),
        ("q", ""),
    ],
)
def test_other_forms_earn_nothing(prompt, response):
    assert format_tags(prompt, response) == 0


def test_without_think_the_answer_block_stands_alone():
    assert format_tags("q", " <answer>5</answer>\n", think=False) == 1
    assert format_tags("q", "<think>a</think><answer>5</answer>", think=False) == 0
    assert format_tags("q", "<answer>5</answer><answer>5</answer>", think=False) == 0


def test_text_with_angle_brackets_and_lines():
    assert format_tags("q", "<think>1 < 2\n\n3 > 2</think>\n\n<answer>a<b</answer>") == 1
