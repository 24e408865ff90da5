"""Reward models as rewards: scored together, normalised, mixed with rules; and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from rl_megatron.checkpoint.hf_reward import become_reward_model
from rl_megatron.config import GRPORun, RewardModelRun, SFTRun, build_run
from rl_megatron.data.packing import MicroBatching
from rl_megatron.data.tokenizer import load_tokenizer
from rl_megatron.errors import CheckpointError, DataError
from rl_megatron.interfaces.records import Prompt, Rollout
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process
from rl_megatron.runtime.reward_models import RewardModels, build_reward_model
from rl_megatron.runtime.rollout_batch import gather_scores
from rl_megatron.runtime.score import build_rewards
from rl_megatron.runtime.tasks import build_grpo, build_reward_task, build_sft
from tests.helpers.minimal_runs import GRPO, SFT, with_settings
from tests.helpers.tiny_model import make_tiny_hf

ALONE = Process(Layout(), 0, torch.device("cpu"))
SPLIT = MicroBatching(micro_batch_size=2)


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("language"))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("scorer"), "qwen2", seed=5, scalar_head=True)


def grpo(folder, *rewards, **settings):
    given = {"backend": "torch", "model__path": str(folder)}
    return build_run(GRPORun, with_settings(GRPO, rewards=list(rewards), **given, **settings))


def rollout(row, ids, finish="stop"):
    prompt = Prompt(row, (10, 20, 30)[: row + 1], "p")
    return Rollout(prompt, 0, tuple(ids), (0.0,) * len(ids), finish, "x" * len(ids), 0)


ROLLOUTS = [rollout(0, [5, 6, 1]), rollout(1, [7, 0, 0, 8], "length"), rollout(2, [1])]


def rewards_of(run, folder, **options):
    models = RewardModels(run, ALONE, SPLIT, load_tokenizer(folder))
    return build_rewards(run.rewards, 8, models.load, **options), models


def expected(scorer):
    """By transformers, one at a time, at the last token: a stop token or, of a cut one, any."""
    model = AutoModelForSequenceClassification.from_pretrained(scorer).eval()
    ids = [torch.tensor([[*r.prompt.token_ids, *r.response_ids]]) for r in ROLLOUTS]
    with torch.no_grad():
        model.config.pad_token_id = None
        return [float(model(row).logits[0, 0]) for row in ids]


def test_scores_are_those_of_transformers_at_the_last_token(language, scorer):
    run = grpo(language, {"name": "reward_model", "path": str(scorer)})
    rewards, _ = rewards_of(run, language)
    scores = gather_scores(ROLLOUTS, rewards, ALONE)
    assert scores.rewards == pytest.approx(expected(scorer), abs=1e-5)
    assert scores.by_name == {"reward_model": scores.rewards}
    assert len({round(value, 3) for value in scores.rewards}) == 3


def test_mixed_with_rules_weighted_and_normalised(language, scorer):
    model = {"name": "reward_model", "path": str(scorer), "weight": 2.0}
    fixed = model | {"normalize": "fixed", "mean": 0.5, "std": 4.0}
    length = {"name": "length", "max_tokens": 3, "weight": 3.0}
    raw, rule = expected(scorer), [0.0, -1.0, 0.0]
    rewards, _ = rewards_of(grpo(language, length, fixed), language)
    scores = gather_scores(ROLLOUTS, rewards, ALONE)
    want = [3.0 * b + 2.0 * (a - 0.5) / 4.0 for a, b in zip(raw, rule, strict=True)]
    assert scores.rewards == pytest.approx(want, abs=1e-5)
    assert list(scores.by_name) == ["length", "reward_model"]
    assert scores.by_name["reward_model"] == pytest.approx(raw, abs=1e-5)

    run = grpo(language, model | {"normalize": "batch"}, length)
    scores = gather_scores(ROLLOUTS, rewards_of(run, language)[0], ALONE)
    mean, std = torch.tensor(raw).mean().item(), torch.tensor(raw).std().item()
    want = [3.0 * b + 2.0 * (a - mean) / std for a, b in zip(raw, rule, strict=True)]
    assert scores.rewards == pytest.approx(want, abs=1e-4)
    # In evaluation the mean would always be 0.
    evaluated, _ = rewards_of(run, language, in_evaluation=True)
    scores = gather_scores(ROLLOUTS, evaluated, ALONE)
    want = [3.0 * b + 2.0 * a for a, b in zip(raw, rule, strict=True)]
    assert scores.rewards == pytest.approx(want, abs=1e-5)


def test_a_model_is_held_once(language, scorer):
    one = {"name": "reward_model", "path": str(scorer)}
    run = grpo(language, one, one | {"label": "again"})
    rewards, models = rewards_of(run, language)
    assert [reward.name for reward in rewards] == ["reward_model", "again"]
    assert len(models._held) == 1


def test_any_run_may_score_its_evaluation_by_a_reward_model(task, tmp_path):
    """With one of the policy's own tokenizer, as the recipe makes it."""
    scorer = tmp_path / "scorer"
    scorer.mkdir()
    for file in (task / "model").iterdir():
        (scorer / file.name).write_bytes(file.read_bytes())
    become_reward_model(scorer)
    weights = load_file(scorer / "model.safetensors")
    del weights["lm_head.weight"]
    # The same score for whatever ends with the same token.
    weights["score.weight"] = torch.zeros(1, 96)
    save_file(weights, scorer / "model.safetensors", metadata={"format": "pt"})
    given = {
        "backend": "torch",
        "model__path": str(task / "model"),
        "data__train__path": str(task / "sft.jsonl"),
        "evaluation": {
            "data": {"path": str(task / "heldout.jsonl")},
            "rewards": [
                {
                    "name": "reward_model",
                    "path": str(scorer),
                    "normalize": "fixed",
                    "mean": 1.0,
                    "std": 2.0,
                }
            ],
            "max_rows": 4,
            "max_response_tokens": 4,
        },
    }
    found = build_sft(build_run(SFTRun, with_settings(SFT, **given)), ALONE).evaluate()
    assert found == {"evaluation/greedy_reward": -0.5, "evaluation/sampled_reward": -0.5}


def test_a_language_model_as_a_reward_is_refused(language):
    run = grpo(language, {"name": "reward_model", "path": str(language)})
    said = rf"^rewards.0.path {language} is a language model without a score.weight; make a reward"
    with pytest.raises(CheckpointError, match=said):
        rewards_of(run, language)


def test_a_missing_reward_model_is_named(language):
    run = grpo(language, {"name": "reward_model", "path": "models/none"})
    with pytest.raises(CheckpointError, match=r"^rewards.0.path models/none does not exist"):
        rewards_of(run, language)


def test_another_tokenizer_is_refused_by_name(language, scorer, tmp_path):
    for file in scorer.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    words = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    run = grpo(language, {"name": "reward_model", "path": str(tmp_path)})
    number = min(vocabulary["a"], vocabulary["b"])
    said = (
        rf"^rewards.0.path {tmp_path} has another tokenizer than the policy: token {number} is 'a' "
        rf"in {language} and 'b' in {tmp_path}"
    )
    with pytest.raises(DataError, match=said):
        rewards_of(run, language)


@pytest.mark.parametrize("recipe", ["sft", "grpo"])
def test_a_reward_model_is_no_policy(recipe, scorer, task):
    rows = {"sft": "sft.jsonl", "grpo": "prompts.jsonl"}[recipe]
    given = {"backend": "torch", "model__path": str(scorer)}
    given |= {"model__tokenizer_path": str(task / "model"), "data__train__path": str(task / rows)}
    said = rf"^model.path {scorer} is a reward model, which has scores and no log-probs; name a"
    with pytest.raises(CheckpointError, match=said):
        if recipe == "sft":
            build_sft(build_run(SFTRun, with_settings(SFT, **given)), ALONE)
        else:
            run = with_settings(GRPO, **given)
            build_grpo(build_run(GRPORun, run), ALONE)


def reward_run(folder, **settings):
    given = {"backend": "torch", "model__path": str(folder), **settings}
    return build_run(RewardModelRun, with_settings(SFT, **given))


def test_a_language_model_begins_with_a_head_from_the_seed(language, scorer):
    heads = [
        dict(build_reward_model(reward_run(language, seed=s), ALONE, SPLIT).named_weights())
        for s in (1, 1, 2)
    ]
    one, again, other = (head["score.weight"] for head in heads)
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert "lm_head.weight" not in heads[0]
    kept = dict(build_reward_model(reward_run(scorer, seed=1), ALONE, SPLIT).named_weights())
    assert torch.equal(
        kept["score.weight"], load_file(scorer / "model.safetensors")["score.weight"]
    )


def test_several_labels_are_refused(scorer, tmp_path):
    for file in scorer.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["id2label"] = {"0": "a", "1": "b", "2": "c"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="has 3 labels .*: a reward model gives one number"):
        build_reward_model(reward_run(tmp_path), ALONE, SPLIT)


def test_a_head_of_another_shape_is_refused(scorer, tmp_path):
    for file in scorer.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["score.weight"] = torch.zeros(2, 32)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((CheckpointError, RuntimeError), match=r"score.weight|cannot be loaded"):
        build_reward_model(reward_run(tmp_path), ALONE, SPLIT)


def test_margins_come_from_the_named_field(task, tmp_path):
    lines = (task / "preferences.jsonl").read_text().splitlines()[:4]
    rows = [json.loads(line) | {"margin": i / 2} for i, line in enumerate(lines)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"data__train__path": str(path), "data__shuffle": False, "train__global_batch_size": 4}
    plain = build_reward_task(reward_run(task / "model", **given), ALONE)
    assert plain.batches.next().margins is None
    named = build_reward_task(
        reward_run(task / "model", **given, data__train__margin_key="margin"), ALONE
    )
    assert named.batches.next().margins.tolist() == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 1.5]
    for wrong in ("much", True, float("nan")):
        path.write_text("".join(json.dumps(row | {"margin": wrong}) + "\n" for row in rows))
        said = r"rows.jsonl:1: field 'margin' \(data.train.margin_key\) is .*a finite number"
        with pytest.raises(DataError, match=said):
            build_reward_task(
                reward_run(task / "model", **given, data__train__margin_key="margin"), ALONE
            )
