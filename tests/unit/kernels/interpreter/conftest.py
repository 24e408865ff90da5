"""Triton kernels run by Triton's interpreter on a CPU, in processes that were started for it.

    TRITON_INTERPRET=1 python -m pytest tests/unit/kernels/interpreter

Triton reads the variable when it is imported, and then never compiles: so these tests have a pytest
of their own, which tests/unit/kernels/test_interpreter.py starts. Without the variable there is
nothing here to collect.

What the interpreter does not show: it rounds bf16 towards 0 when it stores, has no bf16
arithmetic, and knows neither races nor what a compiler fuses.
"""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]
