"""A reward model from its command line to transformers, and GRPO on what it says."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.helpers.recipe_runs import TENSOR_2, execute, read_rows, run_recipe


@pytest.fixture(scope="module")
def trained(task, runs):
    """On two ranks, with a fresh head."""
    return run_recipe("reward_model", task, runs / "reward_model", *TENSOR_2, ranks=2)


@pytest.fixture(scope="module")
def exported(trained):
    folder = trained.folder / "hf"
    words = ("export", "--checkpoint", trained.folder / "checkpoints", "--output", folder)
    done = execute("tools/convert_checkpoint.py", *words)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def scored(task, runs, trained):
    """GRPO on one rank, with the checkpoint of two, beside a rule; all rollouts kept."""
    path = trained.folder / "checkpoints"
    reward = f"{{name: reward_model, path: {path}, normalize: fixed, mean: 0.5, std: 2.0}}"
    rule = "{name: length, max_tokens: 4, penalty: 0.3}"
    words = (f"rewards=[{reward}, {rule}]", "logging.rollouts_per_step=null", "train.ppo_epochs=1")
    return run_recipe("grpo", task, runs / "grpo_reward_model", *words)


class Reader:
    """Scores texts by the exported model, several at once and padded, as its users do."""

    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
        self.model = AutoModelForSequenceClassification.from_pretrained(folder).eval()

    @torch.no_grad()
    def scores(self, texts):
        batch = self.tokenizer(texts, padding=True, return_tensors="pt")
        return self.model(batch.input_ids, attention_mask=batch.attention_mask).logits[:, 0]


def test_the_run_records_held_out_accuracy_and_transformers_agrees(trained, exported, task):
    *rounds, evaluation = trained.rows
    assert [row["step"] for row in rounds] == [1, 2, 3, 4]
    assert {"loss/reward_model", "loss/centering", "rewards/accuracies"} <= rounds[0].keys()
    assert "has no score.weight: it begins with a random one" in trained.log
    reader, rows = Reader(exported), read_rows(task / "heldout_preferences.jsonl")
    assert reader.model.config.num_labels == 1
    chosen, rejected = (
        reader.scores([row["prompt"] + row[side] + "<eos>" for row in rows])
        for side in ("chosen", "rejected")
    )
    both = torch.cat([chosen, rejected])
    want = {
        "chosen": chosen.mean(),
        "rejected": rejected.mean(),
        "margins": (chosen - rejected).mean(),
        "accuracies": (chosen > rejected).float().mean(),
        "mean": both.mean(),
        "std": both.std(),
    }
    for name, value in want.items():
        assert evaluation[f"evaluation/rewards/{name}"] == pytest.approx(float(value), abs=1e-4)


def test_grpo_learns_from_its_scores_and_a_rule(scored, exported):
    reader, rollouts = Reader(exported), read_rows(scored.folder / "rollouts.jsonl")
    assert len(rollouts) == 32
    compared = set()
    for row in rollouts:
        # A response without a stop token was cut, and is scored at the last token that there is.
        response = row["response"] + "<eos>" * (row["finish_reason"] == "stop")
        if len(reader.tokenizer.tokenize(response)) != row["response_tokens"]:
            continue  # The model has said a special token that its text does not show.
        score = float(reader.scores([row["prompt"] + response]))
        rule = -0.3 * (row["response_tokens"] > 4)
        assert row["reward"] == pytest.approx((score - 0.5) / 2.0 + rule, abs=1e-4)
        compared.add(row["finish_reason"])
    assert compared == {"stop", "length"}
    for row in scored.rows[:2]:
        assert {"reward/reward_model", "reward/length"} <= row.keys()
        assert row["optimizer/grad_norm"] > 0
    assert "evaluation/greedy_reward" in scored.rows[-1]
