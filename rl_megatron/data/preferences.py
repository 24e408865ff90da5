"""Pairs of responses to one prompt, one better than the other."""

from __future__ import annotations

import math
import re
from itertools import takewhile

from rl_megatron.config.data import DataSource, Overlong
from rl_megatron.data.chat import Message, parse_conversation, render_response
from rl_megatron.data.examples import Example, PreferencePair, fit_rendered
from rl_megatron.data.overlong import Dropped
from rl_megatron.data.sources import Row, convert_rows, read_rows
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.errors import DataError

Conversation = str | list[Message]
_Parts = tuple[Conversation, Conversation, Conversation]


def load_preferences(
    source: DataSource,
    tokenizer: Tokenizer,
    max_length: int,
    overlong: Overlong,
    setting: str = "data.train",
    margin_key: str | None = None,
) -> list[PreferencePair]:
    """The pairs of all rows, tokenized once.

    A row has chosen and rejected (text or messages). Its prompt is a field of its own, or what
    chosen and rejected have in common at their start. A pair of which either side is dropped is
    dropped. With `margin_key` a row also has a number, its margin.

    Raises:
        DataError: A row cannot be used, or none is left.
    """

    def convert(row: Row) -> PreferencePair | Dropped:
        margin = None if margin_key is None else _margin(row, margin_key, setting)
        prompt, *responses = _prompt_and_responses(row, source, setting)
        sides: list[Example] = []
        for response in responses:
            rendered = render_response(tokenizer, prompt, response, row.get("tools"))
            side = fit_rendered(row.index, rendered, tokenizer, max_length, overlong)
            if isinstance(side, Dropped):
                return side
            sides.append(side)
        return PreferencePair(row.index, *sides, margin)

    return convert_rows(read_rows(source, setting), convert, setting)


def _margin(row: Row, key: str, setting: str) -> float:
    value = row.require(key, f"{setting}.margin_key")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise DataError(
            f"field {key!r} ({setting}.margin_key) is {value!r}; a margin must be a finite number: "
            "mend the row, or set margin_key to null"
        )
    return float(value)


def _prompt_and_responses(row: Row, source: DataSource, setting: str) -> _Parts:
    """Prompt, chosen and rejected, none of which repeats another."""
    chosen, rejected = (
        parse_conversation(row.require(key, f"{setting}.{name}"), key)
        for name, key in (("chosen_key", source.chosen_key), ("rejected_key", source.rejected_key))
    )
    given = row.get(source.prompt_key)
    prompt = None if given is None else parse_conversation(given, source.prompt_key)
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is not None:
            return prompt, chosen, rejected
        common = _common_text(chosen, rejected)
        if not common:
            raise DataError(
                f"no field {source.prompt_key!r} ({setting}.prompt_key), and chosen and rejected "
                "have no beginning in common that could be the prompt"
            )
        return common, chosen[len(common) :], rejected[len(common) :]
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise DataError("chosen and rejected must both be text or both be messages")
    if chosen and chosen[0]["role"] == "assistant":
        row.require(source.prompt_key, f"{setting}.prompt_key")
        return prompt or "", chosen, rejected
    return _split_conversations(prompt, chosen, rejected)


def _split_conversations(
    prompt: Conversation | None, chosen: list[Message], rejected: list[Message]
) -> _Parts:
    """Whole conversations, taken apart where they first differ."""
    both = zip(chosen, rejected, strict=False)
    common = chosen[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))]
    if not common or len(common) in (len(chosen), len(rejected)):
        raise DataError(
            "chosen and rejected are whole conversations, which must begin with the same messages "
            "and end with different ones"
        )
    # A text is how many data sets repeat the last question.
    repeated = common[-1].get("content") if isinstance(prompt, str) else common
    if prompt is not None and prompt != repeated:
        raise DataError(
            "the prompt field is not what chosen and rejected begin with; leave the prompt out of "
            "chosen and rejected, or remove the prompt field"
        )
    return common, chosen[len(common) :], rejected[len(common) :]


def _common_text(chosen: str, rejected: str) -> str:
    """The common beginning, without the word in which the texts part and the spaces before it.

    Tokenizers join a space to the word after it, so it belongs to the responses.
    """
    both = zip(chosen, rejected, strict=False)
    common = chosen[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))]
    return re.sub(r" *[\w'\u2019-]*\Z", "", common)
