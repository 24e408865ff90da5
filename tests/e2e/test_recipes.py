"""The recipes from their command line: what they leave, and that no launch changes a number."""

import math
import statistics

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_megatron.checkpoint.run_state import read_run_state
from rl_megatron.config import dump_run, load_run
from rl_megatron.rewards.answer_tag import answer_tag
from tests.helpers.recipe_runs import RUN_CLASSES, execute, read_rows

# Measures of rounding itself.
ROUNDING = {"rollout/mismatch_kl", "rollout/mismatch_max_abs"}
PHASES = {
    "sft": {"update"},
    "dpo": {"ref_logprobs", "update"},
    "kto": {"ref_logprobs", "kl", "update"},
    "grpo": {"generate", "score", "old_logprobs", "ref_logprobs", "update"},
}


def without_times(row):
    return {name: value for name, value in row.items() if not name.startswith("time/")}


def assert_same_numbers(rows, others, relative=1e-5, floors=None):
    """Equal, relative to each number, or to its floor where it has one and is below it."""
    assert len(rows) == len(others)
    for row, other in zip(map(without_times, rows), map(without_times, others), strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            least = 1e-5 if name in ROUNDING else max(1e-8, relative * (floors or {}).get(name, 0))
            assert other[name] == pytest.approx(value, rel=relative, abs=least), name


@pytest.mark.parametrize("name", ["sft", "grpo", "dpo", "kto"])
def test_a_run_leaves_its_folder(name, request):
    run = request.getfixturevalue(name)
    files = {"config.yaml", "metrics.jsonl", "tensorboard", "logs", "checkpoints", "curve.png"}
    if name == "grpo":
        files.add("rollouts.jsonl")
    assert {path.name for path in run.folder.iterdir()} == files
    checkpoints = run.folder / "checkpoints"
    saved = ["iter_0000008"] if name == "grpo" else ["iter_0000002", "iter_0000004"]
    assert sorted(path.name for path in checkpoints.iterdir() if path.is_dir()) == saved
    pointer = (checkpoints / "latest_checkpointed_iteration.txt").read_text()
    assert int(pointer) == int(saved[-1].removeprefix("iter_"))
    assert (run.folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert any((run.folder / "tensorboard").iterdir())
    for said in (f"e2e-{name} in {run.folder}", "evaluation after step", "saved", "done:"):
        assert said in run.log
        assert said in run.done.stderr
    assert run.done.stdout == ""


@pytest.mark.parametrize("name", ["sft", "grpo_tp2", "dpo_dp2"])
def test_config_yaml_is_the_resolved_run(name, request):
    run = request.getfixturevalue(name)
    file, *overrides = run.words
    resolved = load_run(RUN_CLASSES[name.partition("_")[0]], file, overrides)
    assert (run.folder / "config.yaml").read_text() == dump_run(resolved)


@pytest.mark.parametrize("name", ["sft", "grpo", "dpo", "kto"])
def test_metrics_are_finite_and_named(name, request):
    everything = request.getfixturevalue(name).rows
    *rounds, evaluation = [row for row in everything if "drift/kl" not in row]
    steps = [4, 8] if name == "grpo" else [1, 2, 3, 4]
    assert [row["step"] for row in rounds] == steps
    assert evaluation["step"] == steps[-1]
    for row in rounds:
        assert {"loss/total", "optimizer/grad_norm", "optimizer/lr"} <= row.keys()
        assert {f"time/{phase}_seconds" for phase in PHASES[name]} <= row.keys()
        assert "time/update_tokens_per_second" in row and row["time/step_seconds"] > 0
        assert row["optimizer/skipped"] == 0 and row["optimizer/grad_norm"] > 0
    for row in (*rounds, evaluation):
        assert all(math.isfinite(value) for value in row.values())
    answered = {"evaluation/greedy_reward", "evaluation/sampled_reward"}
    if name in ("dpo", "kto"):
        (drift,) = [row for row in everything if "drift/kl" in row]
        assert drift["step"] == 4 and drift["drift/kl"] > drift["drift/kl_per_token"] > 0
    held_out = {
        "sft": {"loss/nll"},
        "dpo": {"loss/dpo", "rewards/accuracies"},
        "kto": {"loss/kto", "rewards/chosen", "rewards/margins", "kl"},
        "grpo": set(),
    }[name]
    assert answered | {f"evaluation/{metric}" for metric in held_out} <= evaluation.keys()


def test_sft_lowers_the_loss_of_the_rows_it_sees(sft):
    *rounds, evaluation = sft.rows
    assert evaluation["evaluation/loss/nll"] < 0.7 * rounds[0]["loss/nll"]


def test_dpo_starts_at_ln_2_and_moves(dpo):
    first, *_, evaluation = dpo.rows
    assert first["loss/dpo"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/margins"] == pytest.approx(0.0, abs=1e-6)
    assert evaluation["evaluation/rewards/margins"] != 0


def test_kto_starts_at_half_of_its_weights_and_moves(kto):
    first, *_, last = [row for row in kto.rows if "loss/kto" in row]
    assert first["loss/kto"] == pytest.approx(0.5, abs=1e-6)
    for name in ("rewards/chosen", "rewards/rejected", "kl"):
        assert first[name] == pytest.approx(0.0, abs=1e-5)
    assert last["kl"] >= 0 and last["rewards/margins"] != 0 and last["loss/kto"] != 0.5
    # Rows and mismatched rows alike were built ahead.
    assert "no reference is held" in kto.log and "reference log-probs 1/" not in kto.log


def test_grpo_writes_rollouts_to_read(grpo):
    rollouts = read_rows(grpo.folder / "rollouts.jsonl")
    assert [(row["step"], row["policy_version"]) for row in rollouts] == [(1, 0)] * 4 + [(5, 4)] * 4
    assert len({row["row_id"] for row in rollouts}) == 8
    for row in rollouts:
        assert eval(row["prompt"].removesuffix("=")) == int(row["answer"])
        right = row["response"] == f"<answer>{row['answer']}</answer>"
        digits = sum(character.isdigit() for character in row["response"])
        assert row["reward"] == pytest.approx(right + 2.0 * digits / 8)
        assert 1 <= row["response_tokens"] <= 8
        assert (row["finish_reason"] == "length") <= (row["response_tokens"] == 8)


def test_grpo_records_a_kl_where_one_is_used(grpo, grpo_kl_in_reward):
    assert [row["policy/kl_to_reference"] > 0 for row in grpo.rows[:2]] == [True, True]
    assert "loss/kl" in grpo.rows[0] and "reward/kl" not in grpo.rows[0]
    first, second, third = grpo_kl_in_reward.rows
    assert "loss/kl" not in first and first["reward/kl"] == 0
    assert second["reward/kl"] > 1.5 * 0.001
    # Down while there is none, up once there is too much of it.
    coefficients = [row["reward/kl_coef"] for row in (first, second, third)]
    assert coefficients == pytest.approx([0.1, 0.1 * 0.97, 0.1 * 0.97 * 1.1])
    (folder,) = (grpo_kl_in_reward.folder / "checkpoints").glob("iter_*")
    state = read_run_state(folder)
    assert state.step == 6
    assert state.parts["kl_in_reward"]["ema_kl"] == pytest.approx(third["reward/kl"])


@pytest.mark.parametrize(
    ("name", "launched"), [("sft", "sft_dp2"), ("grpo", "grpo_tp2"), ("dpo", "dpo_dp2")]
)
def test_two_ranks_write_the_numbers_of_one(name, launched, request):
    one, two = request.getfixturevalue(name), request.getfixturevalue(launched)
    assert_same_numbers(one.rows, two.rows)
    logs = two.folder / "logs/attempt_1"
    assert sorted(path.name for path in logs.iterdir()) == ["rank_0.log", "rank_1.log"]
    assert "2 ranks on cpu" in two.log
    assert "log-probs by cpu (compiled" in two.log and "losses by torch" in two.log
    # Rank 1 says nothing on the terminal and all of it in its file.
    assert two.done.stderr.count("done: ") == 1
    assert "saved" in (logs / "rank_1.log").read_text()


def test_grpo_samples_the_same_responses_on_two_ranks(grpo, grpo_tp2):
    one, two = (read_rows(run.folder / "rollouts.jsonl") for run in (grpo, grpo_tp2))
    assert one == two


@pytest.mark.parametrize("name", ["grpo_torch", "grpo_zero3"])
def test_other_backends_make_the_same_first_steps(name, grpo_kl_in_reward, request):
    run = request.getfixturevalue(name)
    assert_same_numbers(grpo_kl_in_reward.rows[:1], run.rows[:1])
    # Further on, the rounding of two implementations has been through Adam.
    assert_same_numbers(grpo_kl_in_reward.rows[1:], run.rows[1:], relative=1e-3)
    said, expected = (
        [row["response"] for row in read_rows(at.folder / "rollouts.jsonl")[:4]]
        for at in (run, grpo_kl_in_reward)
    )
    assert said == expected
    (saved,) = (run.folder / "checkpoints").glob("iter_*")
    assert {"config.json", "tokenizer.json"} <= {path.name for path in saved.iterdir()}
    assert AutoModelForCausalLM.from_pretrained(saved).num_parameters() > 0


def test_zero_says_what_it_shares(grpo_zero3):
    assert "backend deepspeed, float32" in grpo_zero3.log
    assert "2 ranks on cpu: ZeRO stage 3 over 2;" in grpo_zero3.log
    assert ", deepspeed 0." in grpo_zero3.log


def test_dpo_with_zero_takes_the_cache_that_megatron_made(dpo_zero2):
    first, *_ = dpo_zero2.rows
    assert first["loss/dpo"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    assert "no reference is held" in dpo_zero2.log
    assert "reference log-probs 1/" not in dpo_zero2.log


def test_an_exported_checkpoint_answers_in_transformers_as_it_did_in_the_run(grpo, task, tmp_path):
    words = ("export", "--checkpoint", grpo.folder / "checkpoints", "--output", tmp_path / "hf")
    done = execute("tools/convert_checkpoint.py", *words)
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    rewards = []
    for row in read_rows(task / "heldout.jsonl")[:32]:
        prompt = torch.tensor([tokenizer(row["prompt"]).input_ids])
        ids = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
        response = tokenizer.decode(ids, skip_special_tokens=True)
        digits = sum(character.isdigit() for character in response)
        rewards.append(answer_tag(row["prompt"], response, row["answer"]) + 2.0 * digits / 8)
    assert len(set(rewards)) > 1
    recorded = grpo.rows[-1]["evaluation/greedy_reward"]
    assert statistics.fmean(rewards) == pytest.approx(recorded, abs=1e-9)
