"""The comparison itself, without the process around it (test_math_pool.py has that)."""

import pytest

from rl_megatron.rewards.math_worker import equal


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        (r"1/3^{50}", r"1/3^{51}", False),
        (r"\{0.5,1\}", r"\{\frac{1}{2},1\}", True),
        (r"x=\frac{1}{3}", r"1/3", True),
        (r"\infty", r"-\infty", False),
        (r"x>2", r"(2,\infty)", True),
        (r"", r"", False),
        (r"\frac{1}{0}", r"\frac{2}{0}", False),
        (r"\frac{", r"\frac{", False),
    ],
)
def test_same_value(gold, answer, same):
    assert equal(gold, answer) is same
