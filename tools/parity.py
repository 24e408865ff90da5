"""The same numbers however the job is split: proves it for every loss and layout.

    python tools/parity.py [--only TP2]

Makes two small checkpoints, one of them with experts, and a batch of ragged sequences. Takes one
step, in float32, of every loss under every aggregation: on one rank, in one micro-batch, without
packing, and then in every row of tools/parity_cases.py. Prints the worst difference of a
parameter's gradient, relative to its norm, and exits with 1 if a gradient is further off than 2e-5,
or the loss or another metric further than 1e-6 (relative; of numbers below 1e-3, relative to 1e-3).
All numbers are in runs/parity.json.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rl_megatron.interfaces.metric_names import LOSS_TOTAL  # noqa: E402
from tools.parity_cases import (  # noqa: E402
    CASES,
    MODELS,
    REFERENCES,
    ROWS,
    Row,
    make_batches,
    make_model,
    reference_of,
)

GRADIENT_BOUND = 2e-5
METRIC_BOUND = 1e-6
# Numbers below it are compared as if they were as large, so that 0 can be compared.
METRIC_FLOOR = 1e-3
REPORT = Path("runs/parity.json")


@dataclass(frozen=True)
class Difference:
    """How far a step is from the reference: the worst of each kind, and where it is.

    Attributes:
        gradient: Norm of the difference over that of the gradient, of one parameter.
        parameter: Its name.
        loss: Relative difference of the loss.
        metric: Relative difference of another metric.
        metric_name: Its name.
    """

    gradient: float
    parameter: str
    loss: float
    metric: float
    metric_name: str

    @property
    def within_bounds(self) -> bool:
        """False for NaN too."""
        return self.gradient <= GRADIENT_BOUND and max(self.loss, self.metric) <= METRIC_BOUND


def compare(
    found: tuple[dict[str, float], dict[str, Tensor]],
    expected: tuple[dict[str, float], dict[str, Tensor]],
) -> Difference:
    """The difference of two results; names that one of them lacks are infinitely far off."""
    metrics = {
        name: _relative(found[0].get(name, math.inf), expected[0].get(name, math.inf))
        for name in found[0] | expected[0]
    }
    loss = metrics.pop(LOSS_TOTAL)
    gradients = {
        name: _gradient_difference(found[1].get(name), expected[1].get(name))
        for name in found[1] | expected[1]
    }
    metric_name, parameter = (
        max(metrics, key=metrics.__getitem__),
        max(gradients, key=gradients.__getitem__),
    )
    return Difference(gradients[parameter], parameter, loss, metrics[metric_name], metric_name)


def _relative(found: float, expected: float) -> float:
    difference = abs(found - expected) / max(abs(expected), METRIC_FLOOR)
    return difference if math.isfinite(difference) else math.inf


def _gradient_difference(found: Tensor | None, expected: Tensor | None) -> float:
    if found is None or expected is None or found.shape != expected.shape:
        return math.inf
    difference = float((found.double() - expected.double()).norm())
    if difference == 0:
        return 0.0
    relative = difference / max(float(expected.double().norm()), sys.float_info.min)
    return relative if math.isfinite(relative) else math.inf


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


def check_reference(results: Mapping[str, tuple[dict[str, float], dict[str, Tensor]]]) -> None:
    """Raises ValueError naming a case that has no loss or no gradient: all that is 0 is equal."""
    for name, (metrics, gradients) in results.items():
        if not metrics[LOSS_TOTAL] or not any(bool(value.any()) for value in gradients.values()):
            raise ValueError(
                f"{name}: loss {metrics[LOSS_TOTAL]}, and a gradient of 0 or of nothing; comparing "
                "with it proves nothing. Change the batch in tools/parity_cases.py"
            )


def compare_row(folder: Path, row: Row) -> dict[str, Difference]:
    """Difference by name of case."""
    found = torch.load(folder / f"{row.name}.pt")
    expected = load_reference(folder / f"{reference_of(row).name}.pt")
    return {case.name: compare(found[case.name], expected[case.name]) for case in CASES}


def make_report(differences: dict[str, dict[str, Difference]], seconds: float) -> dict[str, Any]:
    """What runs/parity.json holds, from the differences by row and case."""
    every = [difference for by_case in differences.values() for difference in by_case.values()]
    return {
        "worst_gradient": max(difference.gradient for difference in every),
        "worst_loss": max(difference.loss for difference in every),
        "worst_metric": max(difference.metric for difference in every),
        "gradient_bound": GRADIENT_BOUND,
        "metric_bound": METRIC_BOUND,
        "metric_floor": METRIC_FLOOR,
        "equal": all(difference.within_bounds for difference in every),
        "seconds": round(seconds, 1),
        "rows": [
            {"row": row, "loss": case.loss, "aggregation": case.aggregation}
            | {"differences": asdict(by_case[case.name])}
            for row, by_case in differences.items()
            for case in CASES
        ],
    }


def make_table(differences: dict[str, dict[str, Difference]]) -> Table:
    """Rows by losses; worst gradient over the aggregations, and the worst metric of the row."""
    table = Table(
        title="Worst difference of a parameter's gradient, relative to its norm", box=SIMPLE
    )
    table.add_column("", no_wrap=True)
    columns = list(dict.fromkeys(case.loss for case in CASES))
    for column in (*columns, "metrics"):
        table.add_column(column, justify="right")
    for row, by_case in differences.items():
        by_loss: dict[str, list[Difference]] = defaultdict(list)
        for case in CASES:
            by_loss[case.loss].append(by_case[case.name])
        cells = [_cell(max(d.gradient for d in by_loss[loss]), GRADIENT_BOUND) for loss in columns]
        metrics = max(max(d.loss, d.metric) for d in by_case.values())
        table.add_row(row, *cells, _cell(metrics, METRIC_BOUND))
    return table


def _cell(value: float, bound: float) -> str:
    text = f"{value:.1e}".replace("e-0", "e-") if value else "0"
    return text if value <= bound else f"[bold red]{text}[/]"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all numbers are the same."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose name begins with this")
    options = parser.parse_args(arguments)
    rows = [row for row in ROWS if row.name.startswith(options.only)]
    if not rows:
        parser.error(f"--only {options.only}: the rows are {', '.join(row.name for row in ROWS)}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for model in MODELS:
            torch.save(make_batches(make_model(folder / model, model)), folder / f"{model}.pt")
        everything = [*REFERENCES, *rows]
        for world_size in sorted({row.layout.world_size for row in everything}):
            run_ranks(
                folder, world_size, [r for r in everything if r.layout.world_size == world_size]
            )
        differences = {row.name: compare_row(folder, row) for row in rows}
    report = make_report(differences, time.monotonic() - start)
    os.chdir(ROOT)
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    Console(width=max(Console().width, 160)).print(make_table(differences))
    print(
        f"parity: {len(rows)} rows x {len(CASES)} cases in {report['seconds']} s; worst gradient "
        f"{report['worst_gradient']:.2g} (bound {GRADIENT_BOUND:.0e}), worst loss "
        f"{report['worst_loss']:.2g}, worst metric {report['worst_metric']:.2g} (bound "
        f"{METRIC_BOUND:.0e}): {'equal' if report['equal'] else 'NOT EQUAL'}; {REPORT}"
    )
    return 0 if report["equal"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
