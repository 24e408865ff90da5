"""Runs of models that no family of ours describes: from a folder to a saved checkpoint."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rl_megatron.checkpoint.hf_reward import become_reward_model
from rl_megatron.config import DPORun, GRPORun, RewardModelRun, SFTRun, build_run
from rl_megatron.data.packing import pack_rollouts
from rl_megatron.errors import CheckpointError
from rl_megatron.losses import reward_model_objective, sft_objective
from rl_megatron.metrics.timing import PhaseTimer
from rl_megatron.models.fresh_head import SCORE
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process
from rl_megatron.runtime.tasks import build_dpo, build_grpo, build_reward_task, build_sft
from tests.helpers.architectures import make_architecture
from tests.helpers.backend_contract import CLOSE
from tests.helpers.minimal_runs import DPO, GRPO, SFT, with_settings

ALONE = Process(Layout(), 0, torch.device("cpu"))
MODEL_TYPES = pytest.mark.parametrize("model_type", ["gpt2", "gemma3_text", "deepseek_v3"])


@pytest.fixture
def folder(model_type, tmp_path):
    return make_architecture(tmp_path / "model", model_type, max_position_embeddings=256)


def run_of(kind, minimal, folder, rows, **settings):
    given = {"backend": "torch", "model__path": str(folder), "data__train__path": str(rows)}
    return build_run(kind, with_settings(minimal, **given | settings))


@MODEL_TYPES
def test_sft_saves_what_transformers_reads(folder, task, tmp_path):
    built = build_sft(run_of(SFTRun, SFT, folder, task / "sft.jsonl"), ALONE)
    batch = built.batches.next()
    losses = [built.policy.train_step(batch, sft_objective(), 1e-2)["loss/total"] for _ in range(4)]
    assert losses[-1] < losses[0]
    saved = tmp_path / "saved"
    saved.mkdir()
    built.policy.save(saved).finish()
    names = load_file(folder / "model.safetensors").keys()
    assert load_file(saved / "model.safetensors").keys() == names
    for file in folder.glob("*.json"):
        (saved / file.name).write_bytes(file.read_bytes())
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert dict(built.policy.named_weights()).keys() == names
    tokens = batch.tokens[None, : int(batch.lengths[0])]
    expected = built.policy.module.model(tokens).logits
    torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=1e-5)


@MODEL_TYPES
def test_grpo_samples_and_scores_its_own_tokens(folder, task):
    rollout = {"prompts_per_batch": 2, "group_size": 2, "max_response_tokens": 6}
    built = build_grpo(
        run_of(
            GRPORun,
            GRPO,
            folder,
            task / "prompts.jsonl",
            rollout=rollout,
            rewards=[{"name": "length", "max_tokens": 4}],
        ),
        ALONE,
    )
    rollouts = built.groups.sample(1, PhaseTimer().phase, policy_version=0).rollouts
    batch = pack_rollouts(rollouts, built.sampling.stop_token_ids)
    torch.testing.assert_close(built.policy.logprobs(batch), batch.rollout_logprobs, **CLOSE)


@MODEL_TYPES
def test_dpo_finds_its_reference_in_the_cache_of_the_run_before(folder, task, tmp_path):
    def build(**settings):
        cache = {"cache": str(tmp_path / "cache"), **settings}
        run = run_of(DPORun, DPO, folder, task / "preferences.jsonl", reference=cache)
        return build_dpo(run, ALONE)

    first = build()
    files = sorted((tmp_path / "cache").iterdir())
    again = build(path=str(folder))
    assert sorted((tmp_path / "cache").iterdir()) == files
    batch = first.batches.next()
    assert torch.equal(first.reference.logprobs(batch), again.reference.logprobs(batch))
    expected = first.policy.logprobs(batch)
    torch.testing.assert_close(first.reference.logprobs(batch), expected, **CLOSE)


@MODEL_TYPES
def test_a_reward_model_is_saved_as_transformers_classifier(folder, task, tmp_path):
    run = run_of(RewardModelRun, SFT, folder, task / "preferences.jsonl")
    built = build_reward_task(run, ALONE)
    batch = built.batches.next()
    built.model.train_step(batch, reward_model_objective(), 1e-2)
    saved = tmp_path / "saved"
    saved.mkdir()
    built.model.save(saved).finish()
    for file in folder.glob("*.json"):
        (saved / file.name).write_bytes(file.read_bytes())
    become_reward_model(saved)
    assert SCORE in load_file(saved / "model.safetensors")
    model = AutoModelForSequenceClassification.from_pretrained(saved, dtype=torch.float32).eval()
    sequences = batch.tokens.split(batch.lengths.tolist())
    expected = torch.cat([model(tokens[None]).logits[0] for tokens in sequences])
    torch.testing.assert_close(built.model.scores(batch), expected, **CLOSE)
    again = build_reward_task(run_of(RewardModelRun, SFT, saved, task / "preferences.jsonl"), ALONE)
    assert torch.equal(again.model.scores(batch), built.model.scores(batch))


@pytest.mark.parametrize("model_type", ["gpt2"])
def test_megatron_says_who_takes_it(folder, task):
    run = run_of(SFTRun, SFT, folder, task / "sft.jsonl", backend="megatron")
    with pytest.raises(CheckpointError, match="'gpt2' is not a known family .* backend=deepspeed"):
        build_sft(run, ALONE)
