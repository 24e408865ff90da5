"""Degrees, and what they ask of a batch."""

import pytest

from rl_megatron.parallel.layout import Layout


@pytest.mark.parametrize(
    ("degrees", "world_size", "token_multiple", "micro_batch_multiple"),
    [
        ({}, 1, 1, 1),
        ({"tensor": 4}, 4, 1, 1),
        ({"tensor": 4, "sequence_parallel": True}, 4, 4, 1),
        ({"tensor": 2, "pipeline": 3, "data": 5}, 30, 1, 1),
        ({"pipeline": 4, "virtual": 2}, 4, 1, 4),
        ({"tensor": 8, "pipeline": 4, "context": 2, "data": 2, "expert": 2}, 128, 4, 1),
        ({"tensor": 2, "context": 3, "sequence_parallel": True}, 6, 12, 1),
    ],
)
def test_what_follows_from_the_degrees(degrees, world_size, token_multiple, micro_batch_multiple):
    layout = Layout(**degrees)
    assert layout.world_size == world_size
    assert layout.token_multiple == token_multiple
    assert layout.micro_batch_multiple == micro_batch_multiple


@pytest.mark.parametrize(("num_tokens", "tail"), [(0, 8), (1, 7), (8, 0), (17, 7)])
def test_the_tail_makes_tokens_divide_and_leaves_no_rank_without(num_tokens, tail):
    layout = Layout(tensor=2, context=2, sequence_parallel=True)
    assert layout.tail(num_tokens) == tail
    assert Layout().tail(num_tokens) == (0 if num_tokens else 1)


def test_one_line_says_it_all():
    layout = Layout(tensor=2, pipeline=4, virtual=2, data=3, sequence_parallel=True)
    assert layout.describe() == (
        "tensor 2 (sequence parallel) x pipeline 4 (2 chunks each) x context 1 x data 3"
    )
    assert Layout(data=4, expert=2).describe() == (
        "tensor 1 x pipeline 1 x context 1 x data 4 (expert 2)"
    )
    assert Layout().describe() == "tensor 1 x pipeline 1 x context 1 x data 1"
