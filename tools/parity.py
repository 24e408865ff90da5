"""The same numbers however the job is split: proves it for every loss, layout and backend.

    python tools/parity.py [--only TP2] [--dtype float32]

Makes small checkpoints, one of them with experts and one with a scalar head, and a batch of ragged
sequences. Takes one step, in float32, of every loss under every aggregation: on one rank of
Megatron, in one micro-batch, without packing, and then in every row of tools/parity_cases.py: in
Megatron's layouts, in DeepSpeed's stages of ZeRO, and by plain torch. Prints the worst
difference of a parameter's gradient, relative to its norm, and exits with 1 if a gradient is
further off than 2e-5, or the loss or another metric further than 1e-6 (relative; of numbers below
1e-3, relative to 1e-3).

In bf16, on some of the layouts, the same is measured from one rank in bf16, and may be 0.1 and
0.03: twice what bf16 itself does to one rank, see parity_compare.py.
That yardstick, one rank in bf16 against float32 of the same weights, is printed too. All numbers
are in runs/parity.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.parity_cases import (  # noqa: E402
    CASES,
    DTYPES,
    LOSSES,
    REFERENCES,
    ROWS,
    SCORE_CASES,
    TITLES,
    Row,
    reference_of,
)
from tools.parity_compare import (  # noqa: E402
    BOUNDS,
    METRIC_FLOOR,
    Bounds,
    Difference,
    check_reference,
    compare,
)
from tools.parity_data import MODELS, make_batches, make_model  # noqa: E402

REPORT = Path("runs/parity.json")
Differences = dict[str, Difference]
"""By name of case."""


def run_ranks(folder: Path, world_size: int, rows: Sequence[Row]) -> None:
    """Take the steps of `rows` on so many ranks; results are files in `folder`."""
    job = ["-m", "tools.parity_job", str(folder), *(row.name for row in rows)]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, *job]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"parity: the job of {world_size} ranks failed, see above")


@cache
def load_reference(path: Path) -> Any:
    """Results by name of case, looked over once; many rows are compared with the same."""
    results = torch.load(path)
    check_reference(results)
    return results


def compare_row(folder: Path, row: Row) -> Differences:
    """From what the row is compared with, by name of case."""
    return compare_rows(folder, row, reference_of(row))


def compare_rows(folder: Path, row: Row, reference: Row) -> Differences:
    """Difference by name of case."""
    found = torch.load(folder / f"{row.name}.pt")
    expected = load_reference(folder / f"{reference.name}.pt")
    return {case.name: compare(found[case.name], expected[case.name]) for case in row.cases}


def measure_bf16(folder: Path) -> dict[str, Differences]:
    """How far one rank in bf16 is from float32 of the same weights, by model."""
    pairs = [(row, replace(row, dtype=torch.float32)) for row in REFERENCES if row.is_bf16]
    return {row.model: compare_rows(folder, row, exact) for row, exact in pairs}


def make_report(
    differences: dict[Row, Differences], bf16: dict[str, Differences], seconds: float
) -> dict[str, Any]:
    """What runs/parity.json holds, from the differences by row and case, and by model."""
    exact = [d for row, by_case in differences.items() if not row.is_bf16 for d in by_case.values()]
    rounded = [d for row, by_case in differences.items() if row.is_bf16 for d in by_case.values()]
    return {
        **_worst(exact, ""),
        **_worst(rounded, "_bf16"),
        "gradient_bound": BOUNDS[torch.float32].gradient,
        "metric_bound": BOUNDS[torch.float32].metric,
        "metric_floor": METRIC_FLOOR,
        "bf16_bound": BOUNDS[torch.bfloat16].gradient,
        "bf16_metric_bound": BOUNDS[torch.bfloat16].metric,
        "bf16_from_float32": {
            model: _worst(list(by_case.values()), "") for model, by_case in bf16.items()
        },
        "equal": all(
            difference.within(BOUNDS[row.dtype])
            for row, by_case in differences.items()
            for difference in by_case.values()
        ),
        "seconds": round(seconds, 1),
        "rows": [
            {"row": row.name, "loss": case.loss, "aggregation": case.aggregation}
            | {"differences": asdict(by_case[case.name])}
            for row, by_case in differences.items()
            for case in row.cases
        ],
    }


def _worst(differences: Sequence[Difference], suffix: str) -> dict[str, float]:
    """The worst of each kind; nothing where nothing was compared."""
    kinds = ("gradient", "loss", "metric") if differences else ()
    return {f"worst_{kind}{suffix}": max(getattr(d, kind) for d in differences) for kind in kinds}


def make_table(differences: dict[Row, Differences], bf16: dict[str, Differences]) -> Table:
    """Rows by losses; worst gradient over the aggregations, and the worst metric of the row."""
    table = Table(
        title="Worst difference of a parameter's gradient, relative to its norm", box=SIMPLE
    )
    table.add_column("", no_wrap=True)
    for column in (*LOSSES, "metrics"):
        table.add_column(column, justify="right")
    for row, by_case in differences.items():
        table.add_row(row.name, *_cells(by_case, BOUNDS[row.dtype]))
    for model, by_case in bf16.items():
        table.add_row(f"{TITLES[model]}: bf16 from float32", *_cells(by_case, None))
    return table


def _cells(by_case: Differences, bounds: Bounds | None) -> Iterator[str]:
    """One cell a loss, then that of the metrics; without bounds nothing is red."""
    worst: dict[str, float] = defaultdict(float)
    for case in (*CASES, *SCORE_CASES):
        if case.name in by_case:
            worst[case.loss] = max(worst[case.loss], by_case[case.name].gradient)
    for loss in LOSSES:
        yield _cell(worst[loss], bounds.gradient if bounds else math.inf) if loss in worst else ""
    metric = max(max(d.loss, d.metric) for d in by_case.values())
    yield _cell(metric, bounds.metric if bounds else math.inf)


def _cell(value: float, bound: float) -> str:
    text = f"{value:.1e}".replace("e-0", "e-") if value else "0"
    return text if value <= bound else f"[bold red]{text}[/]"


def describe(report: dict[str, Any]) -> str:
    """The report in a few lines."""
    lines = [f"parity: {len(report['rows'])} comparisons in {report['seconds']} s"]
    for words, suffix, bounds in (
        ("float32", "", BOUNDS[torch.float32]),
        ("bf16", "_bf16", BOUNDS[torch.bfloat16]),
    ):
        if f"worst_loss{suffix}" in report:
            lines.append(
                f"{words}: worst gradient {report[f'worst_gradient{suffix}']:.2g} (bound "
                f"{bounds.gradient:.0e}), worst loss {report[f'worst_loss{suffix}']:.2g}, worst "
                f"metric {report[f'worst_metric{suffix}']:.2g} (bound {bounds.metric:.0e})"
            )
    lines.append(f"{'equal' if report['equal'] else 'NOT EQUAL'}; {REPORT}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all numbers are the same."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose name begins with this")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="rows of this type only")
    options = parser.parse_args(arguments)
    dtypes = [DTYPES[options.dtype]] if options.dtype else list(DTYPES.values())
    rows = [row for row in ROWS if row.name.startswith(options.only) and row.dtype in dtypes]
    if not rows:
        parser.error(
            f"nothing is left of the rows, which are {', '.join(row.name for row in ROWS)}"
        )
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for model in MODELS:
            torch.save(make_batches(make_model(folder / model, model)), folder / f"{model}.pt")
        # bf16 is measured with float32 of the same weights.
        everything = [r for r in REFERENCES if torch.bfloat16 in dtypes or not r.is_bf16] + rows
        for world_size in sorted({row.layout.world_size for row in everything}):
            run_ranks(
                folder, world_size, [r for r in everything if r.layout.world_size == world_size]
            )
        differences = {row: compare_row(folder, row) for row in rows}
        bf16 = measure_bf16(folder) if torch.bfloat16 in dtypes else {}
    report = make_report(differences, bf16, time.monotonic() - start)
    os.chdir(ROOT)
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    Console(width=max(Console().width, 180)).print(make_table(differences, bf16))
    print(describe(report))
    return 0 if report["equal"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
