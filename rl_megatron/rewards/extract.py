"""Where the answer is in a response: the one extractor of training and evaluation.

Every function takes the response alone: nothing that a prompt says can earn credit. Where a
response names several answers the last one counts, so listing candidates earns nothing.
"""

from __future__ import annotations

import re
from typing import Literal

Where = Literal["auto", "boxed", "marker", "answer_tag"]

# A box opens, an escaped character (\{ is no brace), a brace.
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_MARKER = re.compile(r"####[ \t]*([^\n]*)")
_LEADING_NUMBER = re.compile(r"[-+]?(?:\\?\$)?[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\\?%)?")
_OPENED_TAG = re.compile(r"<(?:think|answer)>\s*\Z")


def boxed_answer(text: str) -> str | None:
    r"""The content of the last balanced \boxed{...} or \fbox{...}; None if there is none.

    A box in a box counts as the later one. An empty box is no answer.
    """
    last_start, content = -1, ""
    opened: list[int] = []  # where the content of each open box starts; -1 for a plain brace
    for brace in _BRACES.finditer(text):
        token = brace.group()
        if token == "}":
            start = opened.pop() if opened else -1
            if start > last_start:
                last_start, content = start, text[start : brace.start()]
        elif token.endswith("{") and token != r"\{":
            opened.append(brace.end() if len(token) > 1 else -1)
    return content.strip() or None


def marker_answer(text: str) -> str | None:
    """What stands behind the last `####`; None if there is none.

    That is the rest of its line, or the number at its start if no other number follows on the
    line (`#### 72 apples.` gives `72`, `#### 72 73` stays whole and so equals no number).
    """
    markers = _MARKER.findall(text)
    if not markers:
        return None
    line: str = markers[-1].strip()
    number = _LEADING_NUMBER.match(line)
    if number and not re.search(r"[\d\\/^]", line[number.end() :]):
        line = number.group().rstrip(",")
    return line or None


def tag_answer(text: str) -> str | None:
    """The content of the only <answer> tag behind the reasoning; None if there are none or more.

    Tags within the reasoning (before the last </think>, or after a <think> that is never closed)
    are thoughts, not answers. A box within the tag gives the box's content.
    """
    behind = text.rpartition("</think>")[2].partition("<think>")[0]
    if behind.count("<answer>") != 1:
        return None
    content, closed, _ = behind.partition("<answer>")[2].partition("</answer>")
    if not closed:
        return None
    return boxed_answer(content) if _has_box(content) else content.strip() or None


def _has_box(text: str) -> bool:
    return r"\boxed" in text or r"\fbox" in text


def extract_answer(text: str, where: Where = "auto") -> str | None:
    """The answer of a response; None if there is none.

    "auto" reads the first of these that the response uses: <answer> tag, box, `####` marker.
    """
    if where == "auto":
        if "<answer>" in text.rpartition("</think>")[2]:
            where = "answer_tag"
        else:
            where = "boxed" if _has_box(text) else "marker"
    return {"boxed": boxed_answer, "marker": marker_answer, "answer_tag": tag_answer}[where](text)


def with_prefill(prompt: str, response: str) -> str:
    """The response together with the <think> or <answer> that the prompt's end has opened for it.

    Some chat templates end the prompt with `<think>`: the response then never opens the tag.
    """
    opened = _OPENED_TAG.search(prompt)
    return opened.group() + response if opened else response
