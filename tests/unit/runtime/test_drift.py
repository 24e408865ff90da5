"""The KL to the reference on what the policy says, and the alarm when it grows."""

import logging
from contextlib import nullcontext

import pytest
import torch

from rl_megatron.config import DPORun, build_run
from rl_megatron.config.drift import DriftConfig
from rl_megatron.interfaces.records import Prompt, Rollout, Sampling
from rl_megatron.runtime.drift import GrowthAlarm, KLSnapshot
from tests.helpers.minimal_runs import DPO, complaint, with_settings

SAMPLING = Sampling(temperature=1.0, max_response_tokens=3, stop_token_ids=())


class Engine:
    """Always says the same."""

    def sampling(self, policy_version):
        return nullcontext(self)

    def generate(self, prompts, sampling, group_size, seed):
        assert (sampling, group_size, seed) == (SAMPLING, 1, 7)
        said = {0: (5, 6), 1: (7,)}
        return [
            Rollout(p, 0, said[p.row_id], (0.0,) * len(said[p.row_id]), "length", "", 0)
            for p in prompts
        ]


class Model:
    """Says the log-probs that it was given, on response tokens."""

    def __init__(self, *logprobs):
        self.given = torch.tensor(logprobs)

    def logprobs(self, batch):
        return torch.zeros(batch.num_tokens).masked_scatter(batch.response_mask, self.given)


def snapshot(policy, reference, **settings):
    prompts = [Prompt(row, (1, 2), "", None) for row in range(2)]
    return KLSnapshot(
        DriftConfig(**settings), prompts, SAMPLING, Engine(), policy, reference, seed=7
    )


def test_the_kl_is_the_sum_of_k3_over_a_response():
    # r = reference - policy: 0.5 and -0.5 in the first response, 1 in the second.
    policy, reference = Model(-1.0, -2.0, -3.0), Model(-0.5, -2.5, -2.0)
    metrics, stop = snapshot(policy, reference).measure(10)
    first = (0.148721 + 0.106531, 0.718282)
    assert metrics["drift/kl"] == pytest.approx(sum(first) / 2, abs=1e-5)
    assert metrics["drift/kl_per_token"] == pytest.approx(sum(first) / 3, abs=1e-5)
    assert metrics["drift/alarm"] == 0 and not stop


def test_equal_models_have_no_kl():
    metrics, _ = snapshot(Model(-1.0, -2.0, -3.0), Model(-1.0, -2.0, -3.0)).measure(10)
    assert metrics["drift/kl"] == 0


@pytest.mark.parametrize("stop_on_growth", [False, True])
def test_growth_is_told_with_advice_and_ends_the_run_if_asked(stop_on_growth, caplog):
    policy, reference = Model(-3.0, -3.0, -3.0), Model(-1.5, -1.5, -1.5)
    watched = snapshot(policy, reference, stop_on_growth=stop_on_growth)
    assert watched.measure(200)[1] is False
    policy.given -= 1
    with caplog.at_level(logging.WARNING):
        metrics, stop = watched.measure(400)
    assert metrics["drift/alarm"] == 1 and stop == stop_on_growth
    assert "after step 200 to" in caplog.text
    for word in ("optimizer.lr", "loss.beta", "diverse"):
        assert word in caplog.text


def test_the_window_moves_with_the_run():
    alarm = GrowthAlarm(window=100, factor=2.0, floor=1.0)
    assert [alarm.check(step, kl) is None for step, kl in [(0, 2.0), (50, 3.9), (100, 4.0)]] == [
        True,
        True,
        True,
    ]
    # Against 3.9 after step 50: what was after step 0 is out of the window.
    assert alarm.check(150, 7.0) is None
    assert alarm.check(160, 8.1) is not None


def test_what_is_small_may_grow():
    alarm = GrowthAlarm(window=100, factor=2.0, floor=1.0)
    assert alarm.check(0, 0.001) is None
    assert alarm.check(10, 1.9) is None
    assert alarm.check(20, 2.1) is not None


def test_without_prompts_nothing_is_watched():
    run = build_run(DPORun, DPO)
    assert not run.watches_drift
    assert complaint(DPORun, DPO, drift__num_prompts=8).startswith("drift = ")
    evaluation = {"data": {"path": "p.jsonl"}, "rewards": [{"name": "answer_tag"}]}
    assert build_run(DPORun, with_settings(DPO, evaluation=evaluation)).watches_drift
    off = with_settings(DPO, evaluation=evaluation, drift__kl_snapshot_interval=0)
    assert not build_run(DPORun, off).watches_drift
