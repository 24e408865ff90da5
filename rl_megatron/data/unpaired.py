"""Responses with a verdict each, desirable or not, and responses to prompts of other rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rl_megatron.config.data import JudgedSource, Overlong
from rl_megatron.data.chat import parse_conversation, render_response
from rl_megatron.data.examples import Example, JudgedExample, fit_rendered
from rl_megatron.data.overlong import Dropped
from rl_megatron.data.preferences import load_preferences
from rl_megatron.data.sources import Row, convert_rows, read_rows
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.errors import DataError

# Field of the response in data sets that TRL reads.
COMPLETION_KEY = "completion"

# Of the order in which rows lend their responses (the paper's number): one for all runs, so that
# one cache serves them all.
_LENDING_KEY = 2402_01306


def load_unpaired(
    source: JudgedSource,
    tokenizer: Tokenizer,
    max_length: int,
    overlong: Overlong,
    setting: str = "data.train",
) -> list[JudgedExample]:
    """The responses of all rows, tokenized once.

    A row has a prompt, a response (or TRL's `completion`) and a verdict, true or false. With
    `unpair` it has chosen and rejected instead, and gives two: the first desirable, the second not.

    Raises:
        DataError: A row cannot be used, or none is left.
    """
    if source.unpair:
        pairs = load_preferences(source, tokenizer, max_length, overlong, setting)
        sides = ((s, d) for p in pairs for s, d in ((p.chosen, True), (p.rejected, False)))
        return [_judged(side, desirable) for side, desirable in sides]

    def convert(row: Row) -> JudgedExample | Dropped:
        key = source.response_key
        if row.get(key) is None and row.get(COMPLETION_KEY) is not None:
            key = COMPLETION_KEY
        prompt = row.require(source.prompt_key, f"{setting}.prompt_key")
        response = row.require(key, f"{setting}.response_key")
        rendered = render_response(
            tokenizer,
            parse_conversation(prompt, source.prompt_key),
            parse_conversation(response, key),
            row.get("tools"),
        )
        desirable = _verdict(row, source, setting)
        fitted = fit_rendered(row.index, rendered, tokenizer, max_length, overlong)
        return fitted if isinstance(fitted, Dropped) else _judged(fitted, desirable)

    return convert_rows(read_rows(source, setting), convert, setting)


def borrow_responses(
    examples: Sequence[JudgedExample], max_length: int, setting: str = "data.train"
) -> list[JudgedExample]:
    """Each row with the response of another row, cut on the right where it is too long.

    All rows stand in a circle, in an order that depends on their number alone, and each lends its
    response to the one before it. Where that has the same prompt, the response would answer it, and
    the row behind is asked.

    Raises:
        DataError: All rows have the same prompt.
    """
    if len({example.prompt_ids for example in examples}) < 2:
        raise DataError(
            f"{setting}: all rows have the same prompt, and loss.loss_type kto measures its KL on "
            "responses to other prompts; add rows, or take loss_type=apo_zero_unpaired"
        )
    count = len(examples)
    key = np.array([_LENDING_KEY, count], dtype=np.uint64)
    circle = np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable").tolist()
    borrowed: dict[int, JudgedExample] = {}
    for place, row in enumerate(circle):
        own = examples[row]
        others = (examples[circle[(place + step) % count]] for step in range(1, count))
        lender = next(other for other in others if other.prompt_ids != own.prompt_ids)
        response = lender.response_ids[: max_length - len(own.prompt_ids)]
        borrowed[row] = replace(own, borrowed_ids=response)
    return [borrowed[row] for row in range(count)]


def _judged(example: Example, desirable: bool) -> JudgedExample:
    return JudgedExample(example.row_id, example.prompt_ids, example.response_ids, desirable)


def _verdict(row: Row, source: JudgedSource, setting: str) -> bool:
    value = row.require(source.label_key, f"{setting}.label_key")
    if not isinstance(value, bool):
        raise DataError(
            f"field {source.label_key!r} ({setting}.label_key) is {value!r}; it must be true "
            "(desirable) or false (undesirable)"
        )
    return value
