"""Responses with verdicts, and which response each prompt borrows."""

import json
from collections import Counter

import pytest

from rl_megatron.config.data import JudgedSource
from rl_megatron.data.examples import JudgedExample
from rl_megatron.data.packing import pack_judged
from rl_megatron.data.unpaired import borrow_responses, load_unpaired
from rl_megatron.errors import DataError


@pytest.fixture
def write_judged(tmp_path):
    def write(*rows, **keys):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return JudgedSource(path=str(path), **keys)

    return write


def texts(tokenizer, examples):
    """Prompt, response without its end token, and verdict of each row."""
    return [
        (
            tokenizer.decode(e.prompt_ids, skip_special=False),
            tokenizer.decode(e.response_ids[:-1], skip_special=False),
            e.desirable,
        )
        for e in examples
    ]


def test_rows_with_a_verdict(tokenizer, write_judged):
    source = write_judged(
        {"prompt": "Q: ", "response": "46", "label": True},
        {"prompt": "R: ", "completion": "7", "label": False},
    )
    assert texts(tokenizer, load_unpaired(source, tokenizer, 300, "error")) == [
        ("Q: ", "46", True),
        ("R: ", "7", False),
    ]
    source = write_judged({"q": "Q: ", "a": "46", "good": False})
    keys = {"prompt_key": "q", "response_key": "a", "label_key": "good"}
    source = JudgedSource(path=source.path, **keys)
    assert texts(tokenizer, load_unpaired(source, tokenizer, 300, "error")) == [
        ("Q: ", "46", False)
    ]


def test_messages(tokenizer, write_judged):
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "y"}
    source = write_judged({"prompt": [user], "completion": [answer], "label": True})
    prompt = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert texts(tokenizer, load_unpaired(source, tokenizer, 300, "error")) == [(prompt, "y", True)]


def test_a_pair_gives_two_rows(tokenizer, write_judged):
    rows = [
        {"prompt": "Q: ", "chosen": "4", "rejected": "5"},
        {"prompt": "R: ", "chosen": "6", "rejected": "7"},
    ]
    source = write_judged(*rows, unpair=True)
    assert texts(tokenizer, load_unpaired(source, tokenizer, 300, "error")) == [
        ("Q: ", "4", True),
        ("Q: ", "5", False),
        ("R: ", "6", True),
        ("R: ", "7", False),
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "Q", "response": "y"}, r"no field 'label' \(data.train.label_key\)"),
        (
            {"prompt": "Q", "response": "y", "label": 1},
            r"field 'label' \(data.train.label_key\) is 1; it must be true \(desirable\) or false",
        ),
        ({"prompt": "Q", "label": True}, r"no field 'response' \(data.train.response_key\)"),
    ],
)
def test_rows_that_cannot_be_used(tokenizer, write_judged, row, said):
    with pytest.raises(DataError, match=said):
        load_unpaired(write_judged(row), tokenizer, 300, "error")


def rows_of(prompts):
    """Responses are numbered, so that the lender is known."""
    return [
        JudgedExample(row, (prompt,), (1000 + row, 7), row % 3 == 0)
        for row, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("prompts", [range(50), [r // 2 for r in range(50)], [0] * 40 + [1, 2]])
def test_each_prompt_borrows_a_response_to_another(prompts):
    rows = rows_of(list(prompts))
    found = borrow_responses(rows, 10)
    assert borrow_responses(rows, 10) == found
    for own, row in zip(rows, found, strict=True):
        lender = rows[row.borrowed_ids[0] - 1000]
        assert lender.prompt_ids != own.prompt_ids
        assert lender.response_ids == row.borrowed_ids
        assert (row.prompt_ids, row.response_ids, row.desirable) == (
            own.prompt_ids,
            own.response_ids,
            own.desirable,
        )


def test_rows_of_different_prompts_each_lend_once_to_some_row_far_off():
    found = borrow_responses(rows_of(range(200)), 10)
    lenders = [row.borrowed_ids[0] - 1000 for row in found]
    assert set(Counter(lenders).values()) == {1}
    # One circle: whoever follows the lenders from the first row comes by all of them.
    at, seen = 0, set()
    while at not in seen:
        seen.add(at)
        at = lenders[at]
    assert len(seen) == 200
    # Data sets are sorted by subject: a neighbour's response is not to be the rule.
    assert sum(abs(row - lender) < 5 for row, lender in enumerate(lenders)) < 20


def test_a_borrowed_response_is_cut_to_fit():
    rows = [JudgedExample(0, (1, 2, 3), (4,), True), JudgedExample(1, (5,), (6, 7, 8), False)]
    assert [row.borrowed_ids for row in borrow_responses(rows, 4)] == [(6,), (4,)]


def test_rows_of_one_prompt_cannot_be_mismatched():
    with pytest.raises(
        DataError, match=r"^data.eval.hard: all rows have the same prompt.*apo_zero"
    ):
        borrow_responses(rows_of([3, 3, 3]), 10, "data.eval.hard")


def test_packing_keeps_verdicts_and_mismatched_rows():
    rows = borrow_responses(rows_of([5, 6]), 10)
    batch = pack_judged(rows)
    assert batch.rows.tokens.tolist() == [5, 1000, 7, 6, 1001, 7]
    assert batch.mismatched.tokens.tolist() == [5, 1001, 7, 6, 1000, 7]
    assert batch.rows.desirable.tolist() == [True, False]
    assert batch.rows.response_mask.tolist() == [False, True, True] * 2
    assert [len(part.tokens) for part in batch.parts] == [6, 6]
    chosen = batch.rows.select([1])
    assert chosen.desirable.tolist() == [False]
    assert chosen.at_tokens(chosen.cu_seqlens[:1]).desirable is None
    alone = pack_judged(rows_of([5, 6]))
    assert alone.mismatched is None and alone.parts == [alone.rows]
