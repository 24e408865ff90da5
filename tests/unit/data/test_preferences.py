"""Preference pairs from rows, with prompts given and implied."""

import pytest

from rl_megatron.config.data import DataSource
from rl_megatron.data.preferences import load_preferences
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.errors import DataError

USER = {"role": "user", "content": "q"}
SYSTEM = {"role": "system", "content": "s"}
GOOD = {"role": "assistant", "content": "y"}
BAD = {"role": "assistant", "content": "n"}
HEADER = "<|im_start|>assistant\n"
QUESTION = "<|im_start|>user\nq<|im_end|>\n" + HEADER


def only_pair(tokenizer: Tokenizer, source: DataSource) -> tuple[str, str, str]:
    """Prompt, chosen, rejected; both end with an end token, which is left out."""
    (pair,) = load_preferences(source, tokenizer, 300, "error")
    assert pair.chosen.prompt_ids == pair.rejected.prompt_ids
    for side in (pair.chosen, pair.rejected):
        assert side.response_ids[-1] == tokenizer.eos_id
        assert side.response_ids.count(tokenizer.eos_id) == 1
    ids = (pair.chosen.prompt_ids, pair.chosen.response_ids[:-1], pair.rejected.response_ids[:-1])
    return tuple(tokenizer.decode(part, skip_special=False) for part in ids)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Q: ", "chosen": "46", "rejected": "$46"}, ("Q: ", "46", "$46")),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, (QUESTION, "y", "n")),
        ({"prompt": [USER], "chosen": "y", "rejected": "n"}, (QUESTION, "y", "n")),
        ({"prompt": "q", "chosen": [GOOD], "rejected": [BAD]}, (QUESTION, "y", "n")),
    ],
)
def test_prompt_given(tokenizer: Tokenizer, write, row: dict, expected: tuple) -> None:
    assert only_pair(tokenizer, write(row)) == expected


@pytest.mark.parametrize("prompt", [{}, {"prompt": "q"}, {"prompt": [USER]}])
def test_whole_conversations(tokenizer: Tokenizer, write, prompt: dict) -> None:
    """With the prompt repeated in a field of its own, as text or as messages, or without one."""
    source = write({**prompt, "chosen": [USER, GOOD], "rejected": [USER, BAD]})
    assert only_pair(tokenizer, source) == (QUESTION, "y", "n")


def test_conversations_of_several_turns(tokenizer: Tokenizer, write) -> None:
    before = [SYSTEM, USER, GOOD, USER]
    prompt, chosen, rejected = only_pair(
        tokenizer, write({"chosen": [*before, GOOD], "rejected": [*before, BAD]})
    )
    assert prompt == ("<|im_start|>system\ns<|im_end|>\n" + QUESTION + "y<|im_end|>\n" + QUESTION)
    assert (chosen, rejected) == ("y", "n")


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        # The space belongs to the word after it.
        (
            "Human: hi Assistant: yes",
            "Human: hi Assistant: no",
            ("Human: hi Assistant:", " yes", " no"),
        ),
        # A word that only begins alike is no part of the prompt.
        ("Assistant: I'm in", "Assistant: I'll go", ("Assistant:", " I'm in", " I'll go")),
        ("1+1=12", "1+1=13", ("1+1=", "12", "13")),
        ("a b", "a b c", ("a", " b", " b c")),
        ("q:\ny", "q:\nn", ("q:\n", "y", "n")),
    ],
)
def test_text_with_its_prompt_implied(
    tokenizer: Tokenizer, write, chosen: str, rejected: str, expected: tuple
) -> None:
    assert only_pair(tokenizer, write({"chosen": chosen, "rejected": rejected})) == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "yes", "rejected": "no"}, r"no field 'prompt' .* beginning in common"),
        ({"chosen": [GOOD], "rejected": [BAD]}, r"no field 'prompt'"),
        ({"prompt": "q", "chosen": "y", "rejected": [BAD]}, "both be text or both be messages"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "must begin with the same messages"),
        ({"chosen": [USER, GOOD], "rejected": [SYSTEM, BAD]}, "must begin with the same messages"),
        (
            {"prompt": [SYSTEM, USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "the prompt field is not what",
        ),
        ({"prompt": "other", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "the prompt field"),
        ({"prompt": "q", "chosen": "y"}, r"no field 'rejected' .*\['chosen', 'prompt'\]"),
        ({"prompt": "q", "chosen": [], "rejected": []}, "must begin with the same messages"),
        ({"prompt": "q", "chosen": [GOOD, USER, GOOD], "rejected": [BAD]}, "one assistant message"),
    ],
)
def test_rows_without_a_clear_prompt_are_refused(
    tokenizer: Tokenizer, write, row: dict, message: str
) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*" + message):
        load_preferences(write(row), tokenizer, 300, "error")


def test_a_pair_is_dropped_as_a_whole(tokenizer: Tokenizer, write) -> None:
    rows = [
        {"prompt": "ab", "chosen": "c", "rejected": "cdef"},
        {"prompt": "ab", "chosen": "cdef", "rejected": "c"},
        {"prompt": "ab", "chosen": "c", "rejected": "d"},
    ]
    (pair,) = load_preferences(write(*rows), tokenizer, 4, "drop")
    assert (pair.row_id, pair.chosen.row_id, pair.rejected.row_id) == (2, 2, 2)


def test_keys_are_the_sources(tokenizer: Tokenizer, write) -> None:
    source = write(
        {"question": "q", "win": "y", "lose": "n"},
        prompt_key="question",
        chosen_key="win",
        rejected_key="lose",
    )
    assert only_pair(tokenizer, source) == ("q", "y", "n")
