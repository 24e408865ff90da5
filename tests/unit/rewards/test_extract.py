import pytest

from rl_megatron.rewards.extract import (
    boxed_answer,
    extract_answer,
    marker_answer,
    tag_answer,
    with_prefill,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"First \boxed{12}. No: \boxed{\frac{3}{4}}.", r"\frac{3}{4}"),
        (r"\boxed{x \in \{1,2\}}", r"x \in \{1,2\}"),
        (r"\fbox{\frac{5}{8}}", r"\frac{5}{8}"),
        (r"\boxed{7", None),
        (r"so \boxed{315}. **Final Answer** \boxed{315}", "315"),
        (r"\boxed{0052}", "0052"),
        (r"\boxed{}", None),
    ],
)
def test_rw_01_which_box(text, answer):
    assert boxed_answer(text) == answer
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{5} but \boxed{7", "5"),
        (r"a { b \boxed{5}", "5"),
        (r"a } b \boxed {5}", "5"),
        (r"\boxed{a\\{b}}", r"a\\{b}"),
        (r"\boxed{ }", None),
        (r"\boxed{5} \boxed{}", None),
        ("no box {5}", None),
        ("", None),
    ],
)
def test_boxes_in_odd_places(text, answer):
    assert boxed_answer(text) == answer


def test_many_open_boxes_take_linear_time():
    assert boxed_answer(r"\boxed{" * 100_000) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("9*8=72\n#### 72\n" + "so it is " * 45, "72"),
        ("#### -1,250", "-1,250"),
        ("#### $1,234.00", "$1,234.00"),
        ("#### 3\nwait\n#### 5", "5"),
        ("the answer is 7", None),
        ("#### 72 apples.", "72"),
        ("####72. That is all", "72"),
        ("#### 72 73 74", "72 73 74"),
        ("#### 1/2", "1/2"),
        ("#### 3, then", "3"),
        (r"#### \frac{1}{2}", r"\frac{1}{2}"),
        ("####\n72", None),
    ],
)
def test_rw_04_marker(text, answer):
    assert marker_answer(text) == answer
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>a</think>\n<answer>5</answer>", "5"),
        ("<answer> 5 </answer>", "5"),
        (r"<think>a</think><answer>so \boxed{5}</answer>", "5"),
        ("<think>a</think><answer>4</answer><answer>5</answer>", None),
        ("<think>a<answer>5</answer></think>", None),
        ("<think>a<answer>4</answer></think><answer>5</answer>", "5"),
        ("<think>a<answer>5</answer>", None),
        ("<answer>5", None),
        ("<answer>4<answer>5</answer>", None),
        ("<answer></answer>", None),
        (r"<answer>\boxed{}</answer>", None),
        ("5", None),
    ],
)
def test_rw_06_answer_tag(text, answer):
    assert tag_answer(text) == answer


def test_auto_takes_the_tag_then_the_box_then_the_marker():
    assert extract_answer(r"\boxed{1} <answer>2</answer> #### 3") == "2"
    assert extract_answer(r"#### 3 \boxed{1}") == "1"
    assert extract_answer("<think><answer>2</answer></think>\n#### 3") == "3"
    # No second chance: two tags are no answer, whatever else there is.
    assert extract_answer(r"\boxed{1} <answer>2</answer><answer>1</answer>") is None


def test_where_reads_one_place_only():
    text = r"\boxed{1} <answer>2</answer> #### 3"
    assert extract_answer(text, "boxed") == "1"
    assert extract_answer(text, "answer_tag") == "2"
    assert extract_answer(text, "marker") == "3"


def test_prefill_is_only_a_tag_opened_at_the_very_end():
    assert with_prefill("q <think>\n", "a</think>") == "<think>\na</think>"
    assert with_prefill("q <answer>", "5</answer>") == "<answer>5</answer>"
    assert with_prefill("use <think> tags", "a") == "a"
