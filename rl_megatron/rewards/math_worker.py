"""The program of one worker process: compares answers with math-verify, one line a question.

Run by path, not imported: it needs none of this package, and a script without a
`if __name__ == "__main__"` guard is not run again, as multiprocessing's spawn would.
Reads `[gold, answer, cpu_seconds]` as JSON lines, writes `1` or `0`; first writes `ready`.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any

import math_verify
import sympy  # type: ignore[import-untyped]

_MEMORY_BYTES = 4 * 1024**3
# Two numbers are the same if they agree to this many digits, however small they are. math-verify
# alone compares absolutely: to it, 1/3^50 equals 1/3^51.
_DIGITS = 25


def equal(gold: str, answer: str) -> bool:
    """Whether two LaTeX expressions mean the same. May run for ever on hostile input."""
    left, right = _parse(gold), _parse(answer)
    if left is None or right is None:
        return False
    verdict = _numbers_equal(left, right)
    if verdict is not None:
        return verdict
    # No rounding of decimals and many digits: tiny values within sets and pairs differ too.
    return bool(
        math_verify.verify(
            left, right, float_rounding=2 * _DIGITS, numeric_precision=100, timeout_seconds=None
        )
    )


def _parse(text: str) -> Any:
    """A sympy expression with exact rationals for decimals, or None."""
    parsed = math_verify.parse(
        f"${text}$",
        extraction_config=[math_verify.LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    if not parsed:
        return None
    expression = parsed[0]
    decimals = {
        number: sympy.Rational(str(number))
        for number in expression.atoms(sympy.Float)
        if number.is_finite
    }
    return expression.xreplace(decimals)


def _numbers_equal(left: Any, right: Any) -> bool | None:
    """Whether two numbers agree to _DIGITS significant digits; None unless both are numbers."""
    left, right = (x.rhs if isinstance(x, sympy.Eq) else x for x in (left, right))
    if not all(isinstance(x, sympy.Expr) and x.is_number and x.is_finite for x in (left, right)):
        return None
    left, right = left.doit(), right.doit()
    scale = max(abs(sympy.N(left, _DIGITS)), abs(sympy.N(right, _DIGITS)))
    return bool(abs(sympy.N(left - right, _DIGITS)) <= scale * sympy.Float(10) ** -_DIGITS)


def main() -> None:
    """Answer until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to act upon
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    logging.disable(logging.CRITICAL)
    equal("x+1", "1+x")  # imports and caches are paid before the first deadline
    # The parsers under math-verify write to both streams.
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    replies.write("ready\n")
    for line in sys.stdin:
        gold, answer, cpu_seconds = json.loads(line)
        # Uncaught, the signal ends this process even inside a single huge multiplication. It
        # counts CPU time: a busy machine does not change a reward.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            verdict = equal(gold, answer)
        except Exception:  # noqa: BLE001  (whatever a parser raises, the answer is not the gold's)
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(f"{int(verdict)}\n")


if __name__ == "__main__":
    main()
