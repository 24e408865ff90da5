"""Whether the fused head and the loss kernels are right and fast on the GPU at hand.

    python tools/bench/gpu_check.py [--tokens 8192 --hidden 4096 --vocab 151936] [--json FILE]

Errors are against float64. Times of the head stand beside bare matrix products of the same sizes,
those of the row kernels beside a copy of as many bytes. Takes a few minutes at most, and exits with
1 if an error is beyond its bound. Without a CUDA device it says so and exits with 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.bench.gpu_errors import Finding, head_errors, loss_errors, row_errors  # noqa: E402
from tools.bench.gpu_speed import Sizes, head_speed, loss_speed, row_speed  # noqa: E402


def main() -> int:
    """Check, print the table, and return 1 if something is beyond its bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check: there is no CUDA device here, so nothing was checked.")
        return 0
    sizes = Sizes(arguments.tokens, arguments.hidden, arguments.vocab)
    findings = list(check(torch.device("cuda"), sizes))
    if arguments.json:
        rows = [asdict(finding) for finding in findings]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    Console().print(table_of(findings, torch.cuda.get_device_name()))
    return 1 if any(finding.is_wrong for finding in findings) else 0


def check(device: torch.device, sizes: Sizes) -> Iterator[Finding]:
    """Everything that is looked at, errors first."""
    yield from row_errors(device)
    yield from head_errors(device)
    yield from loss_errors(device)
    yield from row_speed(device, sizes)
    yield from head_speed(device, sizes)
    yield from loss_speed(device, sizes)


def table_of(findings: list[Finding], device_name: str) -> Table:
    """The findings as a table."""
    table = Table(title=f"Fused head and losses on {device_name}")
    for column in ("what", "value", "unit", "bound"):
        table.add_column(column, justify="left" if column in ("what", "unit") else "right")
    for finding in findings:
        bound = "" if finding.bound is None else f"{finding.bound:.1e}"
        mark = "  WRONG" if finding.is_wrong else ""
        table.add_row(finding.name, f"{finding.value:.4g}", finding.unit, bound + mark)
    return table


if __name__ == "__main__":
    sys.exit(main())
