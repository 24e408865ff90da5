"""The quickstart: a tiny model learns addition by SFT, then better by GRPO and by DPO.

    python tools/quickstart.py
    python tools/quickstart.py tensor_model_parallel_size=2 pipeline_model_parallel_size=2
    python tools/quickstart.py ranks=2                       # data-parallel

Makes the task, runs the three recipes with the files recipes/*/quickstart.yaml, and prints what
the models can do before and after. A layout setting is one of `parallel` and starts as many ranks
as it needs; `ranks` sets their number; other settings (seed=1, backend=torch) go to all recipes.
Everything is in runs/quickstart, which is made anew each time.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rl_megatron.config.parallel import ParallelConfig  # noqa: E402

FOLDER = Path("runs/quickstart")
RECIPES = ("sft", "grpo", "dpo")
SUMMARY = {
    "evaluation/greedy_reward": "greedy_accuracy",
    "evaluation/sampled_reward": "sampled_accuracy",
    "evaluation/rewards/accuracies": "preference_accuracy",
}


def split_settings(arguments: Sequence[str]) -> tuple[list[str], int]:
    """Settings for the recipes, and the number of ranks to start."""
    settings, degrees, ranks = [], {}, 0
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            asked = argument in ("-h", "--help")
            raise SystemExit(__doc__ if asked else f"{argument} is no setting=value; see --help")
        if name == "ranks":
            ranks = int(value)
        elif name in ParallelConfig.model_fields:
            settings.append(f"parallel.{argument}")
            degrees[name] = value
        else:
            settings.append(argument)
    axes = ("tensor_model", "pipeline_model", "context")
    needed = math.prod(int(degrees.get(f"{axis}_parallel_size", 1)) for axis in axes)
    return settings, ranks or needed


def run_recipe(recipe: str, settings: Sequence[str], ranks: int) -> dict[str, float]:
    """Run a recipe in its own process or processes; what its last evaluation found."""
    script = [f"recipes/{recipe}/train.py", f"recipes/{recipe}/quickstart.yaml", *settings]
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    start = time.monotonic()
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*launcher, *script], cwd=ROOT, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    seconds = time.monotonic() - start
    rows = (FOLDER / recipe / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last: dict[str, Any] = next(
        row for row in map(json.loads, reversed(rows)) if "evaluation/greedy_reward" in row
    )
    found = {short: last[name] for name, short in SUMMARY.items() if name in last}
    return {**found, "seconds": round(seconds, 1)}


def print_summary(summary: dict[str, dict[str, float]]) -> None:
    """The table of before and after."""
    table = Table(title="Accuracy on held-out sums")
    columns = ("greedy_accuracy", "sampled_accuracy", "preference_accuracy", "seconds")
    for name in ("model", *(column.replace("_accuracy", "") for column in columns)):
        table.add_column(name, justify="left" if name == "model" else "right")
    titles = {"sft": "before: SFT on a sloppy teacher", "grpo": "after GRPO", "dpo": "after DPO"}
    for recipe, numbers in summary.items():
        cells = [f"{numbers[c]:.3g}" if c in numbers else "-" for c in columns]
        table.add_row(titles[recipe], *cells)
    console = Console()
    console.print(table)
    console.print(f"curves:   {FOLDER}/*/curve.png", highlight=False)
    console.print(f"rollouts: {FOLDER}/grpo/rollouts.jsonl", highlight=False)
    console.print(f"numbers:  {FOLDER}/summary.json", highlight=False)


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    settings, ranks = split_settings(arguments)
    os.chdir(ROOT)
    shutil.rmtree(FOLDER, ignore_errors=True)
    task = [sys.executable, "tools/make_addition_task.py", "--output", str(FOLDER / "task")]
    subprocess.run(task, check=True)
    summary = {}
    for number, recipe in enumerate(RECIPES, start=1):
        print(f"\nquickstart {number}/{len(RECIPES)}: {recipe}", flush=True)
        summary[recipe] = run_recipe(recipe, settings, ranks)
    (FOLDER / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print()
    print_summary(summary)


if __name__ == "__main__":
    main(sys.argv[1:])
