"""Prompts with the responses to imitate."""

from __future__ import annotations

from rl_megatron.config.data import DataSource, Overlong
from rl_megatron.data.chat import RenderedExample, parse_conversation, render_response
from rl_megatron.data.examples import Example, fit_rendered
from rl_megatron.data.overlong import Dropped
from rl_megatron.data.sources import Row, convert_rows, read_rows
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.errors import DataError

MESSAGES_KEY = "messages"


def load_sft(
    source: DataSource,
    tokenizer: Tokenizer,
    max_length: int,
    overlong: Overlong,
    setting: str = "data.train",
) -> list[Example]:
    """The examples of all rows, tokenized once.

    A row has a prompt and a response (text or messages), or `messages`, of which the last turn is
    trained and must be the assistant's.

    Raises:
        DataError: A row cannot be used, or none is left.
    """

    def convert(row: Row) -> Example | Dropped:
        rendered = _render(row, source, tokenizer, setting)
        return fit_rendered(row.index, rendered, tokenizer, max_length, overlong)

    return convert_rows(read_rows(source, setting), convert, setting)


def _render(row: Row, source: DataSource, tokenizer: Tokenizer, setting: str) -> RenderedExample:
    tools = row.get("tools")
    if row.get(MESSAGES_KEY) is not None and row.get(source.response_key) is None:
        messages = parse_conversation(row.get(MESSAGES_KEY), MESSAGES_KEY)
        if isinstance(messages, str) or len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise DataError(
                f"field {MESSAGES_KEY!r} must be a list of messages that ends with the assistant's "
                "answer to a message before it"
            )
        return render_response(tokenizer, messages[:-1], messages[-1:], tools)
    prompt = row.require(source.prompt_key, f"{setting}.prompt_key")
    response = row.require(source.response_key, f"{setting}.response_key")
    return render_response(
        tokenizer,
        parse_conversation(prompt, source.prompt_key),
        parse_conversation(response, source.response_key),
        tools,
    )
