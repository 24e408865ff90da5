"""Whether the <answer> tag holds exactly the known answer."""

from __future__ import annotations

from rl_megatron.rewards.extract import tag_answer, with_prefill


def answer_tag(prompt: str, response: str, answer: str | None) -> float | None:
    """1.0 where the text of the single <answer> tag is the known one, else 0.0.

    None without a known answer. Space around the text does not count.
    """
    if answer is None:
        return None
    return float(tag_answer(with_prefill(prompt, response)) == answer.strip())
