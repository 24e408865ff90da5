"""Requests: order, identity, and when a response ends."""

import pytest

from rl_megatron.interfaces.records import Prompt, Sampling
from rl_megatron.rollout.requests import make_requests, to_rollout

A = Prompt(row_id=10, token_ids=(1, 2), text="a", answer="4")
B = Prompt(row_id=11, token_ids=(1, 2), text="a", answer="5")


def sampling(**more):
    return Sampling(
        **{"temperature": 1.0, "max_response_tokens": 3, "stop_token_ids": (2, 9)} | more
    )


def finished(request, tokens, rules):
    for number, token in enumerate(tokens):
        assert request.finished is None
        request.take(token, -float(number + 1), rules)
    return to_rollout(request, lambda ids: "|".join(map(str, ids)), policy_version=7)


def test_ro_06_requests_are_ordered_by_prompt_then_sample():
    requests = make_requests([A, B], group_size=3, seed=0)
    assert [r.index for r in requests] == list(range(6))
    assert [(r.prompt.row_id, r.sample_index) for r in requests] == [
        (10, 0), (10, 1), (10, 2), (11, 0), (11, 1), (11, 2)
    ]  # fmt: skip
    assert [r.prompt.answer for r in requests] == ["4"] * 3 + ["5"] * 3


def test_every_request_has_its_own_numbers_even_for_equal_prompts():
    keys = [r.key for r in make_requests([A, B], 3, seed=0)]
    assert len(set(keys)) == 6
    assert not set(keys) & {r.key for r in make_requests([A, B], 3, seed=1)}


def test_numbers_follow_the_row_and_not_its_place():
    first = {(r.prompt.row_id, r.sample_index): r.key for r in make_requests([A, B], 2, 5)}
    turned = {(r.prompt.row_id, r.sample_index): r.key for r in make_requests([B, A], 4, 5)}
    assert first.items() <= turned.items()


def test_a_row_that_comes_twice_gets_a_second_group():
    requests = make_requests([A, B, A], group_size=2, seed=0)
    assert [r.sample_index for r in requests] == [0, 1, 0, 1, 2, 3]
    assert len({r.key for r in requests}) == 6


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [([5, 6, 2], "stop"), ([5, 9], "stop"), ([2], "stop"), ([5, 6, 7], "length")],
)
def test_ro_07_ids_and_logprobs_go_together_the_stop_token_included(tokens, reason):
    rollout = finished(make_requests([A], 1, 0)[0], tokens, sampling())
    assert rollout.response_ids == tuple(tokens)
    assert rollout.rollout_logprobs == tuple(-float(i + 1) for i in range(len(tokens)))
    assert rollout.finish_reason == reason
    assert (rollout.prompt, rollout.sample_index, rollout.policy_version) == (A, 0, 7)
    assert rollout.text == "|".join(map(str, tokens))


def test_without_stop_tokens_only_the_length_ends_a_response():
    rules = sampling(stop_token_ids=(), max_response_tokens=4)
    rollout = finished(make_requests([A], 1, 0)[0], [2, 9, 2, 9], rules)
    assert rollout.finish_reason == "length"


def test_an_unfinished_request_is_no_rollout():
    with pytest.raises(AssertionError):
        to_rollout(make_requests([A], 1, 0)[0], str, 0)
