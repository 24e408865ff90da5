"""How text and chat messages become token ids. Nothing else in the package does this.

`render_prompt` makes the ids of every prompt and `render_response` those of every prompt with its
response, so rollouts, training, the reference and evaluation see the same ids:

- The response is always encoded on its own, after the prompt's ids. A tokenizer that would merge
  the last character of the prompt with the first of the response gets no chance to, in training
  as in generation.
- Where the tokenizer begins texts with BOS there is exactly one, whether it was the template, the
  text or the tokenizer that wanted it; a template without BOS gets one too.
- A response ends with exactly one end token, which is trained like any other.
- With chat messages, the response is what the template writes after the prompt. A template that
  rewrites the conversation, so that this is not what generation would continue, is refused.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.errors import DataError

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Messages = Sequence[Message]
Tools = Sequence[Mapping[str, Any]]

# Fields of a message whose text must reach the model.
_TEXT_FIELDS = ("content", "reasoning_content")


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as the model sees it.

    Attributes:
        text: With all that the chat template writes, up to where the response begins.
        token_ids: The same, with BOS where the tokenizer wants one.
    """

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class RenderedExample:
    """A prompt and its response as the model sees them.

    Attributes:
        prompt: What `render_prompt` makes of the prompt.
        response_text: What follows it.
        response_ids: The same, ending with exactly one end token.
    """

    prompt: RenderedPrompt
    response_text: str
    response_ids: tuple[int, ...]


def render_prompt(
    tokenizer: Tokenizer, prompt: str | Messages, tools: Tools | None = None
) -> RenderedPrompt:
    """The prompt, ready for a response to follow.

    Args:
        tokenizer: With the chat template, where the prompt is messages.
        prompt: Text, which is taken as it is, or messages, which the chat template renders.
        tools: Tool descriptions for the template.

    Raises:
        DataError: The messages cannot be rendered.
    """
    if isinstance(prompt, str):
        text = prompt
    else:
        if not prompt or prompt[-1]["role"] == "assistant":
            raise DataError(
                "a prompt must have a message, and end with one that is not the assistant's"
            )
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tools=tools)
        _watch_template(tokenizer, prompt, text)
    return RenderedPrompt(text, _with_one_bos(tokenizer, tokenizer.encode(text)))


def render_response(
    tokenizer: Tokenizer,
    prompt: str | Messages,
    response: str | Messages,
    tools: Tools | None = None,
) -> RenderedExample:
    """The prompt and the response to it.

    Text and messages may be mixed: a text beside messages counts as the message of its side.

    Args:
        tokenizer: With the chat template, where either side is messages.
        prompt: See `render_prompt`.
        response: Text, or a list with one assistant message.
        tools: Tool descriptions for the template.

    Raises:
        DataError: The template refuses or rewrites the conversation.
    """
    if isinstance(prompt, str) and isinstance(response, str):
        rendered, text = render_prompt(tokenizer, prompt), response
    else:
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(response, str):
            response = [{"role": "assistant", "content": response}]
        if [message["role"] for message in response] != ["assistant"]:
            raise DataError(
                "a response must be one assistant message; it has the roles "
                f"{[message['role'] for message in response]}; put earlier turns into the prompt"
            )
        rendered = render_prompt(tokenizer, prompt, tools)
        text = _response_text(tokenizer, rendered.text, prompt, response[0], tools)
    response_ids = tokenizer.encode(text, continues=True)
    return RenderedExample(rendered, text, _with_one_end(tokenizer, response_ids))


def parse_conversation(value: Any, key: str) -> str | list[Message]:
    """The field of a row as text or as messages.

    Raises:
        DataError: It is neither.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise DataError(
            f"field {key!r} must be text or a list of messages, not {type(value).__name__}"
        )
    for message in value:
        content = message.get("content") if isinstance(message, dict) else None
        # A message that only calls tools has no content.
        silent = isinstance(message, dict) and content is None and "tool_calls" in message
        if not (silent or isinstance(content, str)) or not isinstance(message.get("role"), str):
            raise DataError(
                f"field {key!r} must hold messages with 'role' and 'content', both text; "
                f"one of them is {message!r}"
            )
    return value


def _response_text(
    tokenizer: Tokenizer,
    prompt_text: str,
    prompt: Messages,
    response: Message,
    tools: Tools | None,
) -> str:
    """What the template writes after the prompt, if that is what generation would continue."""
    whole = tokenizer.apply_chat_template(
        [*prompt, response], add_generation_prompt=False, tools=tools
    )
    remedy = (
        "a model trained on it would never be asked so; change the row, or set model.chat_template "
        "to a template that keeps the conversation as it is"
    )
    if not whole.startswith(prompt_text):
        same = next(
            (i for i, (a, b) in enumerate(zip(whole, prompt_text, strict=False)) if a != b),
            min(len(whole), len(prompt_text)),
        )
        raise DataError(
            "the chat template renders the prompt differently once the response follows: "
            f"{prompt_text[same : same + 40]!r} becomes {whole[same : same + 40]!r}; {remedy}"
        )
    text = whole[len(prompt_text) :]
    header = _after(prompt_text, prompt[-1].get("content") or "")
    for field in _TEXT_FIELDS:
        wanted = response.get(field) or ""
        # The header may open the turn's thinking block already.
        if _squeeze(wanted) not in _squeeze(header + text):
            raise DataError(
                f"the chat template drops text of the assistant's turn: {wanted[:80]!r} is "
                f"rendered as {text[:80]!r}; {remedy}"
            )
    ends_with_header = text.endswith(header) and text != header
    if ends_with_header and tokenizer.decode(tokenizer.encode(header, continues=True)).strip():
        raise DataError(
            f"the chat template writes {header!r} after the assistant's turn as well; it must do "
            "so for add_generation_prompt only"
        )
    return text


def _after(text: str, part: str) -> str:
    """What follows the last occurrence of `part`; nothing where it does not occur."""
    return text.rpartition(part.strip())[2] if part.strip() and part.strip() in text else ""


def _squeeze(text: str) -> str:
    """Without white space, which templates may strip or add around a message."""
    return "".join(text.split())


def _with_one_bos(tokenizer: Tokenizer, ids: list[int]) -> tuple[int, ...]:
    if tokenizer.bos_id is None:
        return tuple(ids)
    return (tokenizer.bos_id, *_without_leading(ids, tokenizer.bos_id))


def _with_one_end(tokenizer: Tokenizer, ids: list[int]) -> tuple[int, ...]:
    """The response up to its first end token, if nothing but blanks and end tokens follow it.

    Templates write a line break after the end token, and sometimes a second end token, that
    generation never gets to. A response without an end token gets the tokenizer's.
    """
    if tokenizer.bos_id is not None:
        ids = _without_leading(ids, tokenizer.bos_id)
    end = None
    for index in range(len(ids) - 1, -1, -1):
        if ids[index] in tokenizer.stop_ids:
            end = index
        elif tokenizer.decode([ids[index]], skip_special=False).strip():
            break
    return (*ids, tokenizer.eos_id) if end is None else tuple(ids[: end + 1])


def _without_leading(ids: list[int], token_id: int) -> list[int]:
    start = next((i for i, other in enumerate(ids) if other != token_id), len(ids))
    return ids[start:]


def _watch_template(tokenizer: Tokenizer, prompt: Messages, text: str) -> None:
    """Say, once for each tokenizer, what its template adds to and drops from conversations."""
    if prompt[0]["role"] != "system":
        _log_injected_system_prompt(tokenizer)
    for message in prompt:
        role, content = message["role"], message.get("content") or ""
        if role in ("system", "tool") and _squeeze(content) not in _squeeze(text):
            _warn_dropped_role(tokenizer, role)


@functools.cache
def _log_injected_system_prompt(tokenizer: Tokenizer) -> None:
    """Log what stands before a first user turn but not before a later one, BOS aside."""
    first, answer, second = "first question", "first answer", "second question"
    turns = [("user", first), ("assistant", answer), ("user", second)]
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    except DataError:
        return  # A template for other conversations than this one; the rows may suit it.
    before, _, rest = text.partition(first)
    between = rest.partition(answer)[2].partition(second)[0]
    shared = 0
    while shared < min(len(before), len(between)) and before[-1 - shared] == between[-1 - shared]:
        shared += 1
    injected = before[: len(before) - shared]
    if between and tokenizer.decode(tokenizer.encode(injected)).strip():
        logger.info(
            "the chat template begins conversations without a system message with %r; this is "
            "part of all prompts, in rollouts as in training",
            injected,
        )


@functools.cache
def _warn_dropped_role(tokenizer: Tokenizer, role: str) -> None:
    logger.warning(
        "the chat template of %s drops or rewrites messages of the role %r; they are missing in "
        "rollouts as in training",
        tokenizer.path,
        role,
    )
