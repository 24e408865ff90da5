"""Prompts from rows."""

import logging
from pathlib import Path

import pytest

from rl_megatron.data.prompts import load_prompts
from rl_megatron.data.tokenizer import Tokenizer, load_tokenizer
from rl_megatron.errors import DataError
from rl_megatron.interfaces.records import Prompt
from tests.helpers.tiny_tokenizers import save_characters


def build(folder: Path, **options) -> Tokenizer:
    """Ids of characters are their place in "\\n", " ", ... plus 3."""
    return load_tokenizer(save_characters(folder / "tokenizer", **options))


def test_a_row_becomes_a_prompt(tmp_path: Path, write) -> None:
    source = write({"prompt": "1+", "answer": "2", "level": 3, "tags": ["a"]})
    (prompt,) = load_prompts(source, build(tmp_path), 10, "error")
    expected = Prompt(0, (21, 15), "1+", "2", {"level": 3, "tags": ["a"]})
    assert prompt == expected


def test_keys_are_the_sources(tmp_path: Path, write) -> None:
    source = write(
        {"question": "1+", "solution": "2", "prompt": "kept"},
        prompt_key="question",
        answer_key="solution",
    )
    (prompt,) = load_prompts(source, build(tmp_path), 10, "error")
    assert (prompt.text, prompt.answer, prompt.extra) == ("1+", "2", {"prompt": "kept"})


@pytest.mark.parametrize(
    ("answer", "expected"), [("2", "2"), (2, "2"), (0.5, "0.5"), (None, None), ("", "")]
)
def test_answers(tmp_path: Path, write, answer: object, expected: str | None) -> None:
    (prompt,) = load_prompts(write({"prompt": "x", "answer": answer}), build(tmp_path), 9, "error")
    assert prompt.answer == expected
    (prompt,) = load_prompts(write({"prompt": "x"}), build(tmp_path), 9, "error")
    assert prompt.answer is None


@pytest.mark.parametrize("answer", [["2"], True, {"value": 2}])
def test_an_answer_of_another_kind_is_refused(tmp_path: Path, write, answer: object) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: field 'answer' must be text or a number"):
        load_prompts(write({"prompt": "x", "answer": answer}), build(tmp_path), 10, "error")


def test_a_missing_prompt_names_line_key_and_keys(tmp_path: Path, write) -> None:
    source = write({"prompt": "x"}, {"question": "x"})
    with pytest.raises(
        DataError,
        match=r"rows\.jsonl:2: no field 'prompt' \(data\.eval\.prompt_key\); .*\['question'\]",
    ):
        load_prompts(source, build(tmp_path), 10, "error", setting="data.eval")


def test_dt_06_equal_prompts_are_rows_of_their_own(tmp_path: Path, write) -> None:
    """And a dropped row does not shift the identity of those after it."""
    source = write({"prompt": "q"}, {"prompt": "too long"}, {"prompt": "q"})
    prompts = load_prompts(source, build(tmp_path), 4, "drop")
    assert [(prompt.row_id, prompt.text) for prompt in prompts] == [(0, "q"), (2, "q")]
    assert prompts[0].token_ids == prompts[1].token_ids


def test_dt_04_over_long_prompts(tmp_path: Path, write, caplog: pytest.LogCaptureFixture) -> None:
    source = write({"prompt": "ab"}, {"prompt": "abcdef"})
    with pytest.raises(DataError, match=r"rows\.jsonl:2: prompt of 6 tokens"):
        load_prompts(source, build(tmp_path), 4, "error")
    with caplog.at_level(logging.INFO):
        assert [p.text for p in load_prompts(source, build(tmp_path), 4, "drop")] == ["ab"]
    assert "dropped 1 of 2 rows: longer than data.max_prompt_length (4)" in caplog.text
    _, left = load_prompts(source, build(tmp_path), 4, "truncate_left")
    _, right = load_prompts(source, build(tmp_path), 4, "truncate_right")
    # Text and ids of a cut prompt say the same.
    assert (left.text, right.text) == ("cdef", "abcd")
    assert left.token_ids == tuple(build(tmp_path).encode("cdef"))


def test_dt_04_length_is_counted_with_template_and_tools(tmp_path: Path, write) -> None:
    template = (
        "{{ tools[0].name }}{{ messages[0].content }}{% if add_generation_prompt %}>>{% endif %}"
    )
    source = write({"prompt": [{"role": "user", "content": "abc"}], "tools": [{"name": "tool"}]})
    with_template = build(tmp_path, chat_template=template)
    with pytest.raises(DataError, match="prompt of 9 tokens"):
        load_prompts(source, with_template, 4, "error")
    (prompt,) = load_prompts(source, with_template, 9, "error")
    assert prompt.text == "toolabc>>"


def test_dt_04_empty_prompts(tmp_path: Path, write, caplog: pytest.LogCaptureFixture) -> None:
    source = write({"prompt": ""}, {"prompt": "x"})
    with caplog.at_level(logging.INFO):
        assert [p.row_id for p in load_prompts(source, build(tmp_path), 4, "error")] == [1]
    assert "dropped 1 of 2 rows: empty prompt" in caplog.text
    with_bos = build(tmp_path, prepends_bos=True)
    assert [p.token_ids for p in load_prompts(source, with_bos, 4, "error")][0] == (1,)
