import json
import random

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.make_addition_task import (
    VOCABULARY,
    preference_rows,
    sft_rows,
    sloppy_sum,
    split_pairs,
    write_task,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("addition")
    write_task(folder, seed=0, repeats=2)
    return folder


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_same_seed_writes_the_same_bytes(folder, tmp_path):
    write_task(tmp_path, seed=0, repeats=2)
    files = sorted(f.relative_to(folder) for f in folder.rglob("*") if f.is_file())
    assert len(files) >= 7
    for file in files:
        assert (tmp_path / file).read_bytes() == (folder / file).read_bytes(), file


def test_every_pair_is_trained_on_or_held_out():
    train, held_out = split_pairs(0)
    assert len(train) == 2250 and len(held_out) == 250
    assert len({*train, *held_out}) == 2500
    assert split_pairs(1)[1] != held_out


def test_files_agree_about_the_split(folder):
    prompts, held_out = rows(folder / "prompts.jsonl"), rows(folder / "heldout.jsonl")
    assert all(eval(r["prompt"][:-1]) == int(r["answer"]) for r in prompts + held_out)
    trained = {r["prompt"] for r in rows(folder / "sft.jsonl")}
    assert trained == {r["prompt"] for r in prompts}
    assert not trained & {r["prompt"] for r in held_out}


@pytest.mark.parametrize(
    ("preferences", "answers"),
    [("preferences.jsonl", "prompts.jsonl"), ("heldout_preferences.jsonl", "heldout.jsonl")],
)
def test_preferences_are_the_right_answer_against_a_wrong_one(preferences, answers, folder):
    known = {row["prompt"]: int(row["answer"]) for row in rows(folder / answers)}
    pairs = rows(folder / preferences)
    assert [pair["prompt"] for pair in pairs] == list(known)
    # An error of the teacher: a carry, or one or two, or both; never below 0.
    possible = {-10, -12, -11, -9, -8, -2, -1, 1, 2}
    for pair in pairs:
        total = known[pair["prompt"]]
        assert pair["chosen"] == f"<answer>{total}</answer>"
        wrong = pair["rejected"].removeprefix("<answer>").removesuffix("</answer>")
        assert int(wrong) - total in possible and int(wrong) >= 0


def test_preferences_depend_on_the_seed_and_end_where_errors_are_rare():
    assert preference_rows([(0, 0)], seed=0)[0]["rejected"] != "<answer>0</answer>"
    pairs = [(a, 7) for a in range(40)]
    assert preference_rows(pairs, seed=0) == preference_rows(pairs, seed=0)
    assert preference_rows(pairs, seed=0) != preference_rows(pairs, seed=1)


def test_the_teacher_is_right_about_half_the_time():
    train, _ = split_pairs(0)
    written = sft_rows(train, seed=0, repeats=8)
    right = [r["response"] == f"<answer>{eval(r['prompt'][:-1])}</answer>" for r in written]
    # (0.55 + 0.45 * 0.3) * 0.7 = 0.4795; 18000 rows: a standard deviation is 0.004.
    assert sum(right) / len(right) == pytest.approx(0.4795, abs=0.02)


def test_the_teacher_errs_by_a_carry_or_a_little():
    errors = {sloppy_sum(15, 17, random.Random(seed)) - 32 for seed in range(500)}
    assert errors == {0, -1, -2, 1, 2, -10, -9, -8, -11, -12}
    errors = {sloppy_sum(11, 12, random.Random(seed)) - 23 for seed in range(200)}
    assert errors == {0, -1, -2, 1, 2}
    assert min(sloppy_sum(0, 0, random.Random(seed)) for seed in range(200)) == 0


def test_the_tokenizer_round_trips_and_shows_the_tags(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert len(tokenizer) == len(VOCABULARY) == 32
    text = "12+49=<answer>61</answer>"
    ids = tokenizer(text).input_ids
    assert len(ids) == 1 + 6 + 1 + 2 + 1  # bos, prompt, tag, digits, tag
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_the_model_is_small_and_two_ranks_can_share_it(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert 200_000 < model.num_parameters() < 300_000
    config = model.config
    assert config.vocab_size == 32 and config.num_hidden_layers == 2 and config.head_dim == 32
    for number in (config.num_attention_heads, config.num_key_value_heads):
        assert number % 2 == 0
    assert model.generation_config.eos_token_id == config.eos_token_id == VOCABULARY.index("<eos>")
