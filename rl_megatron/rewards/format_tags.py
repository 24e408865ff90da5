"""Whether a response keeps to the form <think>...</think> <answer>...</answer>."""

from __future__ import annotations

import re

from rl_megatron.rewards.extract import with_prefill

# Something that is not blank, with none of the four tags in it.
_TEXT = r"\s*(?:(?!</?(?:think|answer)>)\S)(?:(?!</?(?:think|answer)>).)*"
_ANSWER = rf"<answer>{_TEXT}</answer>"
_ONLY_ANSWER = re.compile(rf"\s*{_ANSWER}\s*", re.DOTALL)
_BOTH = re.compile(rf"\s*<think>{_TEXT}</think>\s*{_ANSWER}\s*", re.DOTALL)


def format_tags(
    prompt: str, response: str, answer: str | None = None, *, think: bool = True
) -> float:
    """1.0 where the response is one <think> block and then one <answer> block, else 0.0.

    Neither may be blank, and nothing but space may stand around them. A tag that the prompt's end
    has opened counts as the response's. With `think` False the <answer> block stands alone.
    """
    pattern = _BOTH if think else _ONLY_ANSWER
    return float(pattern.fullmatch(with_prefill(prompt, response)) is not None)
