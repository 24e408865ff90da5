"""SFT examples from rows."""

import pytest

from rl_megatron.config.data import DataSource
from rl_megatron.data.sft import load_sft
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.errors import DataError

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "y"}


def texts(tokenizer: Tokenizer, source: DataSource) -> list[tuple[str, str]]:
    examples = load_sft(source, tokenizer, 200, "error")
    return [
        tuple(tokenizer.decode(ids, skip_special=False) for ids in (e.prompt_ids, e.response_ids))
        for e in examples
    ]


def test_prompt_and_response_as_text(tokenizer: Tokenizer, write) -> None:
    source = write({"q": "1+1=", "a": "2"}, prompt_key="q", response_key="a")
    assert texts(tokenizer, source) == [("1+1=", "2<|im_end|>")]


def test_of_messages_the_last_turn_is_trained(tokenizer: Tokenizer, write) -> None:
    source = write({"messages": [USER, ANSWER, USER, {**ANSWER, "content": "z"}]})
    before = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert texts(tokenizer, source) == [(before + "y<|im_end|>\n" + before, "z<|im_end|>")]


def test_prompt_and_response_go_before_messages(tokenizer: Tokenizer, write) -> None:
    source = write({"messages": [USER, ANSWER], "prompt": "a", "response": "b"})
    assert texts(tokenizer, source) == [("a", "b<|im_end|>")]


@pytest.mark.parametrize("messages", ["q", [], [USER], [ANSWER], [USER, ANSWER, USER]])
def test_messages_must_end_with_an_answer(tokenizer: Tokenizer, write, messages: object) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: field 'messages' must be a list"):
        load_sft(write({"messages": messages}), tokenizer, 200, "error")


def test_a_missing_response_is_named(tokenizer: Tokenizer, write) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: no field 'response' .*\['prompt'\]"):
        load_sft(write({"prompt": "q"}), tokenizer, 200, "error")


def test_rows_are_cut_or_dropped_and_keep_their_identity(tokenizer: Tokenizer, write) -> None:
    source = write(
        {"prompt": "abcd", "response": "e"},
        {"prompt": "a", "response": "bcdef"},
        {"prompt": "a", "response": "b"},
    )
    (kept,) = load_sft(source, tokenizer, 4, "drop")
    assert kept.row_id == 2
    cut = load_sft(source, tokenizer, 4, "truncate_right")
    # Of the first row nothing of the response is left.
    assert [(e.row_id, len(e.prompt_ids), len(e.response_ids)) for e in cut] == [
        (1, 1, 3),
        (2, 1, 2),
    ]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: prompt and response of 4 \+ 2 tokens"):
        load_sft(source, tokenizer, 4, "error")
