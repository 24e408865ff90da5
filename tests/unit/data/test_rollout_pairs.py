"""Pairs from groups of rollouts, worked by hand."""

import pytest

from rl_megatron.data.rollout_pairs import RolloutPair, make_rollout_pairs


def rollout(reward, text=None, row=0, step=1, sample=0, finish="stop"):
    return {
        "step": step,
        "row_id": row,
        "sample_index": sample,
        "response": text or f"response {reward}",
        "reward": reward,
        "finish_reason": finish,
    }


def test_the_best_of_a_group_against_the_worst():
    group = [rollout(reward, sample=i) for i, reward in enumerate([0.2, 1.0, 0.0, 0.7])]
    pairs, counts = make_rollout_pairs(group, min_margin=0.5)
    assert pairs == [RolloutPair(0, 1, "response 1.0", "response 0.0", 1.0)]
    assert counts.groups == {4: 1} and not counts.skipped


def test_groups_are_of_one_prompt_in_one_batch():
    rows = [rollout(1.0, row=3), rollout(0.0, row=4), rollout(0.0, row=3, step=2)]
    pairs, counts = make_rollout_pairs(rows, min_margin=0.5)
    assert pairs == [] and counts.groups == {1: 3}
    assert counts.skipped == {"fewer than two rollouts that count": 3}


@pytest.mark.parametrize(("margin", "number"), [(0.5, 1), (0.51, 0)])
def test_the_margin_is_the_least_that_counts(margin, number):
    pairs, counts = make_rollout_pairs([rollout(0.25), rollout(0.75)], margin)
    assert len(pairs) == number
    assert sum(counts.skipped.values()) == 1 - number


def test_unscored_and_cut_responses_take_no_part():
    group = [rollout(None), rollout(1.0, finish="length"), rollout(0.6), rollout(0.1)]
    (pair,), _ = make_rollout_pairs(group, 0.5)
    assert (pair.chosen, pair.rejected) == ("response 0.6", "response 0.1")
    (pair,), _ = make_rollout_pairs(group, 0.5, keep_truncated=True)
    assert pair.chosen == "response 1.0"


def test_of_equal_rewards_the_first_sample_counts():
    group = [rollout(1.0, "b", sample=1), rollout(1.0, "a", sample=0), rollout(0.0, "c", sample=2)]
    (pair,), _ = make_rollout_pairs(group, 0.5)
    assert pair.chosen == "a"


def test_the_same_pair_is_given_once():
    rows = [rollout(r, step=step) for step in (1, 2) for r in (1.0, 0.0)]
    pairs, counts = make_rollout_pairs(rows, 0.5)
    assert len(pairs) == 1 and counts.skipped == {"the same pair as before": 1}
    rows = [rollout(r, row=row) for row in (1, 2) for r in (1.0, 0.0)]
    assert len(make_rollout_pairs(rows, 0.5)[0]) == 2
