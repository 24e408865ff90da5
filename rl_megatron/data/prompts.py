"""Prompts for rollouts."""

from __future__ import annotations

from typing import Any

from rl_megatron.config.data import DataSource, Overlong
from rl_megatron.data.chat import parse_conversation, render_prompt
from rl_megatron.data.overlong import Dropped, fit_prompt
from rl_megatron.data.sources import Row, convert_rows, read_rows
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.errors import DataError
from rl_megatron.interfaces.records import Prompt


def load_prompts(
    source: DataSource,
    tokenizer: Tokenizer,
    max_prompt_length: int,
    overlong: Overlong,
    setting: str = "data.train",
) -> list[Prompt]:
    """The prompts of all rows, tokenized once.

    A row has a prompt (text or messages), may have an answer and a list of `tools` for the chat
    template; all fields but prompt and answer are passed on to rewards.

    Raises:
        DataError: A row cannot be used, or none is left.
    """

    def convert(row: Row) -> Prompt | Dropped:
        value = row.require(source.prompt_key, f"{setting}.prompt_key")
        prompt = parse_conversation(value, source.prompt_key)
        rendered = render_prompt(tokenizer, prompt, row.get("tools"))
        ids = fit_prompt(rendered.token_ids, max_prompt_length, overlong, tokenizer.bos_id)
        if isinstance(ids, Dropped):
            return ids
        used = (source.prompt_key, source.answer_key)
        return Prompt(
            row_id=row.index,
            token_ids=ids,
            # Of a prompt that was cut, rewards and logs see what the model saw.
            text=rendered.text if ids == rendered.token_ids else tokenizer.decode(ids),
            answer=_as_answer(row.get(source.answer_key), source.answer_key),
            extra={name: value for name, value in row.fields.items() if name not in used},
        )

    return convert_rows(read_rows(source, setting), convert, setting)


def _as_answer(value: Any, key: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise DataError(f"field {key!r} must be text or a number, not {type(value).__name__}")
