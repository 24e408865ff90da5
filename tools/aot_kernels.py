"""Compiles every Triton kernel for GPUs that need not be here, and judges what came out.

    python tools/aot_kernels.py [--targets sm_90 gfx942] [--json FILE]

The variants are those that runs use: the doors of the kernels are called with small tensors, and
what they would have started is compiled instead. Exits with 1 if a kernel spills registers or
wants more shared memory than its GPU has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.aot_compile import TARGETS, Compiled, compile_launch  # noqa: E402
from tools.aot_variants import variants  # noqa: E402


def main() -> int:
    """Compile, print the table, and return 1 if a kernel is not as it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--kernels", default="", help="only variants whose name contains this")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    arguments = parser.parse_args()
    rows = compile_all(arguments.targets, arguments.kernels, arguments.jobs)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return report(rows)


def report(rows: Sequence[Compiled]) -> int:
    """Print the table and what is wrong, and return 1 if anything is."""
    Console(width=max(Console().width, 120)).print(table_of(rows))
    if not any(row.tensor_core for row in rows):
        print("No kernel uses tensor cores: matrix products are cuBLAS's.")
    faults = [fault for row in rows for fault in row.faults()]
    for fault in faults:
        print(fault)
    return 1 if faults else 0


def compile_all(targets: Sequence[str], only: str, jobs: int) -> list[Compiled]:
    """Every variant whose name contains `only`, for every target, in `jobs` processes."""
    names = [name for name in variants() if only in name]
    # A process each for some variants: compiling holds the interpreter's lock.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        per_variant = pool.map(partial(compile_variant, targets=tuple(targets)), names)
        return [row for rows in per_variant for row in rows]


def compile_variant(name: str, targets: Sequence[str]) -> list[Compiled]:
    """One variant for each target."""
    launch = variants()[name]
    return [compile_launch(name, launch, target) for target in targets]


def table_of(rows: Sequence[Compiled]) -> Table:
    """The rows as a table."""
    table = Table(title="Triton kernels, compiled ahead of time")
    table.add_column("kernel")
    table.add_column("target")
    for column in ("registers", "spills", "shared bytes", "tensor core", "load bits"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.kernel,
            row.target,
            str(row.registers),
            str(row.spills),
            str(row.shared_bytes),
            str(row.tensor_core),
            str(row.load_bits),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
