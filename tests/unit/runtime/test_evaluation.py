import math
from contextlib import nullcontext

import pytest
import torch

from rl_megatron.interfaces import metric_names as names
from rl_megatron.interfaces.batch import JudgedBatch
from rl_megatron.interfaces.records import Prompt, Rollout, Sampling
from rl_megatron.losses import (
    dpo_objective,
    kto_objective,
    reward_model_objective,
    sft_objective,
)
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process
from rl_megatron.runtime.evaluation import (
    Evaluation,
    held_out_kto_metrics,
    held_out_metrics,
    mismatch_kl,
    reward_metrics,
)
from rl_megatron.runtime.score import NamedReward
from tests.helpers.packed import packed

ALONE = Process(Layout(), 0, torch.device("cpu"))


class Model:
    """Says the log-probs that it was given."""

    def __init__(self, *logprobs):
        self.given = torch.tensor(logprobs)

    def logprobs(self, batch):
        return self.given


class Engine:
    """Right where it is greedy and the prompt is even."""

    def __init__(self):
        self.calls = []

    def sampling(self):
        return nullcontext(self)

    def generate(self, prompts, sampling, group_size, seed):
        self.calls.append(([p.row_id for p in prompts], sampling, group_size, seed))
        greedy = sampling.temperature == 0
        right = [greedy and p.row_id % 2 == 0 for p in prompts]
        return [
            Rollout(p, 0, (1,), (0.0,), "stop", str(ok), 0)
            for p, ok in zip(prompts, right, strict=True)
        ]


def test_prompts_are_answered_greedily_and_at_temperature_1():
    engine = Engine()
    reward = NamedReward("right", 1.0, lambda rollouts: [float(r.text == "True") for r in rollouts])
    sampling = Sampling(temperature=0.7, max_response_tokens=5, stop_token_ids=(2,))
    prompts = [Prompt(row, (1,), "", "") for row in range(5)]
    evaluation = Evaluation(prompts, [reward], sampling, batch_size=2, seed=11)
    assert evaluation.run(engine, ALONE) == {
        names.EVALUATION_GREEDY: 0.6,
        names.EVALUATION_SAMPLED: 0.0,
    }
    assert [rows for rows, *_ in engine.calls] == [[0, 1], [2, 3], [4]] * 2
    assert [s.temperature for _, s, *_ in engine.calls] == [0.0] * 3 + [1.0] * 3
    for _, used, group_size, seed in engine.calls:
        assert (used.max_response_tokens, used.stop_token_ids) == (5, (2,))
        assert (group_size, seed) == (1, 11)


def test_unscored_answers_are_left_out_of_the_mean():
    reward = NamedReward("r", 1.0, lambda rs: [None if r.prompt.row_id else 0.5 for r in rs])
    sampling = Sampling(temperature=0.0, max_response_tokens=5, stop_token_ids=(2,))
    prompts = [Prompt(row, (1,), "", "") for row in range(2)]
    means = Evaluation(prompts, [reward], sampling, 2, 0).run(Engine(), ALONE)
    assert set(means.values()) == {0.5}


def test_held_out_rows_of_sft():
    batch = packed([[0, 1, 1], [0, 1]])
    policy = Model(9.0, -1.0, -2.0, 9.0, -6.0)
    metrics = held_out_metrics(policy, None, sft_objective(), {"": batch})
    # Entropy cannot be known from log-probs.
    expected = {"evaluation/loss/total": 3.0, "evaluation/loss/nll": 3.0}
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_each_set_of_held_out_rows_by_its_name():
    policy = Model(9.0, -1.0, -2.0, 9.0, -6.0)
    # The same log-probs under masks that leave out the last and the first sequence.
    easy, hard = packed([[0, 1, 1], [0, 0]]), packed([[0, 0, 0], [0, 1]])
    metrics = held_out_metrics(policy, None, sft_objective(), {"easy": easy, "hard": hard})
    assert metrics == pytest.approx(
        {
            "evaluation/easy/loss/total": 1.5,
            "evaluation/easy/loss/nll": 1.5,
            "evaluation/hard/loss/total": 6.0,
            "evaluation/hard/loss/nll": 6.0,
        },
        rel=1e-6,
    )
    assert held_out_metrics(policy, None, sft_objective(), {}) == {}


def test_held_out_pairs_of_dpo():
    batch = packed([[0, 1, 1], [0, 1]], paired=True)
    policy, reference = Model(0.0, -1.0, -2.0, 0.0, -4.0), Model(0.0, -2.0, -2.0, 0.0, -3.0)
    metrics = held_out_metrics(policy, reference, dpo_objective(beta=0.5), {"": batch})
    loss = math.log1p(math.exp(-1.0))
    assert metrics == pytest.approx(
        {
            "evaluation/loss/total": loss,
            "evaluation/loss/dpo": loss,
            "evaluation/rewards/chosen": 0.5,
            "evaluation/rewards/rejected": -0.5,
            "evaluation/rewards/margins": 1.0,
            "evaluation/rewards/accuracies": 1.0,
            "evaluation/logps/chosen": -3.0,
            "evaluation/logps/rejected": -4.0,
        },
        rel=1e-6,
    )


class Scorer:
    """Gives the scores that it was given."""

    def __init__(self, *scores):
        self.given = torch.tensor(scores)

    def scores(self, batch):
        return self.given


def test_a_reward_model_on_held_out_pairs_with_the_scale_of_its_scores():
    """Margins 1 and -1; the third pair has an empty side and is no part of anything."""
    batch = packed([[0, 1], [0, 1, 1], [0, 1], [0, 1], [0, 1], [0, 0]], paired=True)
    model = Scorer(2.0, 1.0, -1.0, 0.0, 50.0, 70.0)
    found = reward_metrics(model, reward_model_objective(), {"": batch})
    loss = (math.log1p(math.exp(-1)) + math.log1p(math.exp(1))) / 2
    assert found == pytest.approx(
        {
            "evaluation/loss/total": loss,
            "evaluation/loss/reward_model": loss,
            "evaluation/rewards/chosen": 0.5,
            "evaluation/rewards/rejected": 0.5,
            "evaluation/rewards/margins": 0.0,
            "evaluation/rewards/accuracies": 0.5,
            # Of 2, 1, -1, 0: squared deviations 2.25, 0.25, 2.25, 0.25 over n - 1 = 3.
            "evaluation/rewards/mean": 0.5,
            "evaluation/rewards/std": math.sqrt(5 / 3),
        }
    )
    named = reward_metrics(model, reward_model_objective(), {"easy": batch})
    assert named["evaluation/easy/rewards/accuracies"] == 0.5


def test_held_out_rows_of_kto_with_a_kl_of_each_set():
    policy, reference = Model(0.0, -1.0, 0.0, -4.0), Model(0.0, -2.0, 0.0, -3.0)
    rows = packed([[0, 1], [0, 1]], desirable=torch.tensor([True, False]))
    # Mismatched: the first response alone, whose log-ratio is 1; then none at all.
    sets = {"a": JudgedBatch(rows, packed([[0, 1], [0, 0]])), "b": JudgedBatch(rows)}
    metrics = held_out_kto_metrics(
        policy, reference, lambda kl: kto_objective(beta=0.5, kl=kl), sets
    )
    above = lambda x: 1 / (1 + math.exp(x))  # noqa: E731 - 1 - sigmoid(x)
    # Log-ratios are 1 and -1; the KL is 1 or 0.
    losses = {"a": (above(0.0) + above(1.0)) / 2, "b": above(0.5)}
    expected = {}
    for name, kl in (("a", 1.0), ("b", 0.0)):
        expected |= {
            f"evaluation/{name}/loss/total": losses[name],
            f"evaluation/{name}/loss/kto": losses[name],
            f"evaluation/{name}/rewards/chosen": 0.5,
            f"evaluation/{name}/rewards/rejected": -0.5,
            f"evaluation/{name}/rewards/margins": 1.0,
            f"evaluation/{name}/logps/chosen": -1.0,
            f"evaluation/{name}/logps/rejected": -4.0,
            f"evaluation/{name}/kl": kl,
        }
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert mismatch_kl(policy, reference, sets["a"]) == 1.0
