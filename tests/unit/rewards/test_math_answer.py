"""Comparisons that need computer algebra share one pool of worker processes: about a second."""

import pytest

from rl_megatron.rewards.math_answer import equal_answers, math_answers

SECONDS = 20.0  # of CPU time; nothing here takes more than a fraction of one

# Unequal or equal in both directions.
SYMMETRIC = [
    (r"1/3^{50}", r"1/3^{51}", False),
    (r"(2,5)", r"(2,5.5)", False),
    (r"4,5,6", r"3,4,5", False),
    (r"\pm 8", r"8", False),
    (r"1,234", r"1234", True),
    (r"1,2", r"12", False),
    (r"35\%", r"35 percent", True),
    (r"35\%", r"0.35", True),
    (r"1/2", r"\frac12", True),
    (r"0.5", r"\frac{1}{2}", True),
    (r"**91**", r"91", True),
    (r"2-\frac{3}{e}", r"2+\frac{3}{e}", False),
    (r"35\%", r"35", True),  # the documented choice
]

MORE = [
    (r"0.35", r"35", False),
    (r"3.5\%", r"35\%", False),
    (r"\frac{1}{2}\%", r"0.005", True),
    (r"\frac{1}{3^{200}}", r"\frac{1}{3^{201}}", False),
    (r"(1/3^{50},1)", r"(1/3^{51},1)", False),
    (r"0.0000001", r"0.0000002", False),
    (r"(0.0000001,1)", r"(0.0000002,1)", False),
    (r"0.333", r"\frac{1}{3}", False),
    (r"\sqrt{2}", r"1.41421356", False),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", True),
    (r"(x+1)^2", r"x^2+2x+1", True),
    (r"(0.5,1)", r"(\frac{1}{2},1)", True),
    (r"(1,2)", r"(2,1)", False),
    (r"(1,2)", r"2", False),
    (r"1,2", r"2,1", True),
    (r"[1,2)", r"[1,2]", False),
    (r"\{1,2\}", r"\{2,1\}", True),
    (r"1234", r"1, 234", False),
    (r"x=18", r"18", True),
    (r"18", r"18\text{ cm}^2", True),
    (r"90^\circ", r"90", True),
    (r"no", r"on", False),
    (r"Monday", r"\text{monday}.", True),
    (r"\text{(A)}", r"A", True),
    (r"5", r"5\text{ million}", False),
    (r"8", r"2**3", False),
    (r"23", r"2**3", False),
]


@pytest.mark.parametrize("swapped", [False, True])
def test_rw_03_equality_by_value(swapped):
    cases = SYMMETRIC + MORE
    # "18" as the known answer forbids arithmetic; the unit is not any.
    pairs = [(b, a) if swapped else (a, b) for a, b, _ in cases]
    found = equal_answers(pairs, SECONDS)
    assert [(*c[:2], f) for c, f in zip(cases, found, strict=True)] == cases


@pytest.mark.parametrize(
    ("gold", "given"),
    [
        ("52", "0052"),
        ("1000", "1e3"),
        ("-5", "\u22125"),
        ("1234", r"\$1,234.00"),
        ("12345", r"12\,345"),
        ("12345", "12{,}345"),
        ("1.5", r"1\frac{1}{2}"),
        ("300", r"3 \times 10^2"),
        ("0.001", "10^{-3}"),
        (r"\frac{3}{4}", r"$\dfrac{3}{4}$"),
        (r"-\frac{1}{2}", r"\frac{-1}{2}"),
        ("5", "5."),
        ("0.5", ".5"),
        ("2", r"\frac{4}{2}"),
    ],
)
def test_ways_to_write_a_number(gold, given, no_workers):
    assert equal_answers([(gold, given), (given, gold)], SECONDS) == [True, True]


@pytest.mark.parametrize(
    "given", ["1+1", "4-2", "1-(-1)", r"\frac{1+3}{2}", r"2 \cdot 1", r"3-\frac{4}{4}", "x=1+1"]
)
def test_work_left_undone_is_no_answer(given, no_workers):
    assert equal_answers([("2", given)], SECONDS) == [False]


@pytest.fixture
def no_workers(monkeypatch):
    """What is compared here must not need a process."""

    def refuse():
        raise AssertionError("asked a worker")

    monkeypatch.setattr("rl_megatron.rewards.math_answer.shared_pool", refuse)


def rewards(texts, answers, where="auto"):
    return math_answers(texts, answers, where=where, timeout_seconds=SECONDS)


def test_rw_01_rewards_of_boxes():
    assert rewards(
        [r"\boxed{0052}", r"\boxed{7", r"\boxed{}", r"\boxed{1} \boxed{\frac{3}{4}}"],
        ["52", "7", "7", "3/4"],
    ) == [1, 0, 0, 1]


def test_rw_04_rewards_of_markers():
    talking = "9*8=72\n#### 72\n" + "x" * 400
    twice = "#### 3\nwait\n#### 5"
    texts = [talking, "#### -1,250", "#### $1,234.00", twice, twice, "the answer is 7", "no marker"]
    answers = ["72", "-1250", "1234", "5", "3", "7", "72"]
    assert rewards(texts, answers, "marker") == [1, 1, 1, 1, 0, 0, 0]


def test_rw_06_rewards_of_tags():
    texts = [
        "<think>a</think>\n<answer>5</answer>",
        "<think>a</think><answer>4</answer><answer>5</answer>",
        r"<think>a</think><answer>\boxed{5}</answer>",
    ]
    assert rewards(texts, ["5"] * 3) == [1, 0, 1]


def test_a_known_answer_may_be_a_worked_solution():
    texts = [r"\boxed{72}", r"\boxed{9}", r"\boxed{1/2}"]
    answers = ["9*8=<<9*8=72>>72\n#### 72", "9*8=72\n#### 72", r"So $\boxed{\frac{1}{2}}$."]
    assert rewards(texts, answers) == [1, 0, 1]


def test_without_a_known_answer_there_is_no_reward():
    assert rewards([r"\boxed{7}"] * 2, [None, " "]) == [None, None]
