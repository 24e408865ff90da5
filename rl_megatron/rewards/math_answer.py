r"""Whether a response's final answer means the same as the known one.

Numbers and words are compared here, exactly and at once; expressions go to math-verify in worker
processes (math_pool.py). The rules where one could argue:

- `35\%` equals `0.35`, and it equals `35`: data sets write the answer to "what percentage" either
  way. Both hold with the sides swapped. `35` and `0.35` are different all the same.
- Where the known answer is a number, work left undone is no answer: `1+1` is not `2` (or the
  model would learn to repeat the question), but `\frac{4}{2}` and `2 \times 10^0` are.
- Decimals are exact: `0.333` is not `1/3`.
- Sets and lists (`1,2`) have no order, pairs (`(1,2)`) have. Units in \text{} are ignored.
- Words are compared as words, without regard to case. math-verify alone reads them as products
  of letters: `no` would equal `on`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from rl_megatron.rewards.extract import (
    Where,
    boxed_answer,
    extract_answer,
    marker_answer,
)
from rl_megatron.rewards.math_pool import shared_pool

# Written differently, meaning the same; applied in this order.
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("[\u2212\u2013\ufe63\uff0d]", "-"),  # minus signs that are not the ASCII one
        (r"(?<![\w)}])\*\*([^*\s][^*]*)\*\*(?![\w({])", r"\1"),  # bold; 2**3 is none
        (r"\\?\$|\\[()\[\]]", ""),  # currency, math delimiters
        (r"\\(?:left|right|displaystyle)(?![A-Za-z])", ""),
        (r"\{,\}|,\\!|(?<=\d)\\[,!](?=\d{3}(?!\d))", ","),  # thousands, as LaTeX spaces them
        (r"\\[!,;: ]|~", " "),
        (r"\\[dt]frac(?![A-Za-z])", r"\\frac"),
        ("\\^ ?(?:\\\\circ(?![A-Za-z])|\\{ ?\\\\circ ?\\})|\u00b0", ""),  # degrees
        (r"\s+", " "),
    )
)
_WRAPPED = re.compile(r"\\(?:text|textbf|mathbf|mathrm|textrm) ?\{([^{}]*)\}")
_PERCENT = re.compile(r" ?(?:\\?%|\bper ?cent|\\text ?\{ ?(?:percent|\\?%) ?\})$", re.IGNORECASE)
_UNIT = re.compile(r"\\(?:text|mathrm|textrm) ?\{[^{}]*\}(?: ?\^ ?\{?\d\}?)?$")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' ]+")
_SCALE = re.compile(r"hundred|thousand|million|billion|trillion|dozen", re.IGNORECASE)

_MAX_DIGITS = 200  # what is longer is left to a process that may be killed
_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
_SCIENTIFIC = re.compile(rf"({_DECIMAL})(?:[eE]([-+]?\d{{1,3}}))?")
_POWER = re.compile(rf"(?:({_DECIMAL}) ?\\(?:times|cdot) ?)?10 ?\^ ?(?:\{{(-?\d{{1,3}})\}}|(\d))")
_RATIO = re.compile(rf"()({_DECIMAL}) ?/ ?({_DECIMAL})")
_FRAC = re.compile(rf"(\d*) ?\\frac ?\{{ ?(-?{_DECIMAL}) ?\}} ?\{{ ?({_DECIMAL}) ?\}}")
_SHORT_FRAC = re.compile(r"(\d*) ?\\frac ?(\d) ?(\d)")
_UNDONE = re.compile(
    r"[\d)}!] ?(?:[-+*/^]|\\(?:cdot|times|div|pm|mp)(?![A-Za-z])) ?(?:\\[a-z]+ ?)?[{(]* ?[-.\d]"
)


def math_answers(
    texts: Sequence[str], answers: Sequence[str | None], *, where: Where, timeout_seconds: float
) -> list[float | None]:
    """1.0 where a response's answer equals the known one, else 0.0; None without a known one.

    A known answer may be a worked solution that ends in a box or a `####` marker (as in GSM8K).
    A comparison that takes more than `timeout_seconds` of CPU time counts as not equal.
    """
    golds = [_gold(answer) for answer in answers]
    asked = [
        (index, gold, given)
        for index, (text, gold) in enumerate(zip(texts, golds, strict=True))
        if gold is not None and (given := extract_answer(text, where)) is not None
    ]
    verdicts = equal_answers([(gold, given) for _, gold, given in asked], timeout_seconds)
    rewards: list[float | None] = [None if gold is None else 0.0 for gold in golds]
    for (index, _, _), verdict in zip(asked, verdicts, strict=True):
        rewards[index] = float(verdict)
    return rewards


def _gold(answer: str | None) -> str | None:
    if answer is None:
        return None
    return boxed_answer(answer) or marker_answer(answer) or answer.strip() or None


def equal_answers(pairs: Sequence[tuple[str, str]], timeout_seconds: float) -> list[bool]:
    """Whether each (known answer, given answer) means the same."""
    readings = [_readings(gold, given) for gold, given in pairs]
    verdicts = {pair: _quick_verdict(*pair) for pair in {p for r in readings for p in r}}
    # Sorted, not as a set yields them: the order in which workers start is the same in each run.
    open_pairs = sorted(pair for pair, verdict in verdicts.items() if verdict is None)
    if open_pairs:
        found = shared_pool().equal(open_pairs, timeout_seconds)
        verdicts.update(zip(open_pairs, found, strict=True))
    return [any(verdicts[pair] for pair in alternatives) for alternatives in readings]


def _readings(gold: str, given: str) -> list[tuple[str, str]]:
    """The pairs of which one must be equal: a lone percent sign may be dropped or divided by."""
    gold, gold_percent = _split_percent(_clean(gold))
    given, given_percent = _split_percent(_clean(given))
    readings = [(gold, given)]
    if gold_percent and not given_percent:
        readings.append((rf"\frac{{{gold}}}{{100}}", given))
    if given_percent and not gold_percent:
        readings.append((gold, rf"\frac{{{given}}}{{100}}"))
    return readings


def _clean(text: str) -> str:
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip()
    wrapped = _WRAPPED.fullmatch(text)
    return (wrapped.group(1) if wrapped else text).strip().removesuffix(".").rstrip()


def _split_percent(text: str) -> tuple[str, bool]:
    core = _PERCENT.sub("", text)
    return core, core != text


def _quick_verdict(gold: str, given: str) -> bool | None:
    """Equal or not where that can be told without computer algebra, else None."""
    if gold.replace(" ", "") == given.replace(" ", ""):
        return True
    gold_number = _number(gold)
    if gold_number is not None:
        given_number = _number(given)
        if given_number is not None:
            return gold_number == given_number
        if _UNDONE.search(_UNIT.sub("", given)):
            return False
    if _WORDS.fullmatch(gold) and _WORDS.fullmatch(given):
        return gold.casefold() == given.casefold()
    if bool(_SCALE.search(gold)) != bool(_SCALE.search(given)):
        return False
    return None


def _number(text: str) -> Fraction | None:
    """The value of a number as people write it, None for anything else."""
    if len(text) > _MAX_DIGITS:
        return None
    sign, digits = (-1, text[1:]) if text[:1] == "-" else (1, text.removeprefix("+"))
    magnitude = _magnitude(digits.strip())
    return None if magnitude is None else sign * magnitude


def _magnitude(text: str) -> Fraction | None:
    if match := _SCIENTIFIC.fullmatch(text):
        return _decimal(match[1]) * Fraction(10) ** int(match[2] or 0)
    if match := _POWER.fullmatch(text):
        return _decimal(match[1] or "1") * Fraction(10) ** int(match[2] or match[3])
    for pattern in (_RATIO, _FRAC, _SHORT_FRAC):
        if match := pattern.fullmatch(text):
            whole, top, bottom = match.groups()
            if _decimal(bottom) == 0:
                return None
            return Fraction(whole or 0) + _decimal(top) / _decimal(bottom)
    return None


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
