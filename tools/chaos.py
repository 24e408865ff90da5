"""Kills runs at random moments and checks that they end as if nothing had happened.

    python tools/chaos.py --kills 100
    python tools/chaos.py --kills 6 --recipes grpo --seed 3
    python tools/chaos.py --kills 6 --backend deepspeed      # ZeRO stage 3

Each recipe runs once unbroken, on the quickstart's task. Then it runs again and again, and in every
attempt one random rank gets SIGKILL at a random moment, half of the time while a checkpoint is
written, published or deleted; the other ranks must end by themselves. Once a run is through, its
weights, optimizer, metrics and rollouts must be those of the unbroken run, bit by bit, and each
attempt must go on from the last checkpoint that there was. Ends with 1 if anything is otherwise.
Everything is in runs/chaos, which is made anew each time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rl_megatron.checkpoint.publish import (  # noqa: E402
    POINTER_FILE,
    iteration_folder,
    read_pointer,
)
from rl_megatron.checkpoint.run_state import STATE_FILE  # noqa: E402
from rl_megatron.metrics.jsonl import read_jsonl  # noqa: E402
from tools.chaos_runs import FOLDER, SMALL, SPLIT, TASK, ZERO_JSON, Attempt, Run  # noqa: E402
from tools.chaos_watch import saved_step  # noqa: E402

# A rank in a collective finds by itself that another one is gone. One that still waits for it to
# join the job does not: a launcher ends it, and so does this program.
ALONE_SECONDS = 10.0
PATIENCE_SECONDS = 60.0
RUN_SECONDS = 600.0
# Runs of a recipe that go wrong, after which it is left.
MAX_FAILURES = 3


@dataclass
class Tally:
    """What has happened so far; times in seconds.

    Attributes:
        goal: Kills after which runs are left alone.
        resumed: First new steps that were seen of attempts that went on from a checkpoint.
    """

    goal: int = 0
    kills: int = 0
    in_saves: int = 0
    slowest_end: float = 0.0
    resumed: int = 0
    slowest_first_step: float = 0.0
    problems: list[str] = field(default_factory=list)

    def take(self, attempt: Attempt) -> None:
        """Note where an attempt that is over went on, and when it was a step further."""
        saved, seconds = attempt.first_step.saved, attempt.first_step.seconds
        if not saved or seconds is None:
            return
        self.resumed += 1
        self.slowest_first_step = max(self.slowest_first_step, seconds)
        if f"the run goes on after step {saved}," not in attempt.said():
            self.problems.append(f"{attempt.run.folder}: does not go on after step {saved}")

    def __str__(self) -> str:
        lines = [
            f"{self.kills} kills, {self.in_saves} of them while a checkpoint was written, "
            "published or deleted",
            f"the other ranks ended within {self.slowest_end:.1f} s of a kill",
            f"{self.resumed} attempts went on from a checkpoint: first new step within "
            f"{self.slowest_first_step:.1f} s of their start",
            f"{len(self.problems)} problems",
        ]
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])


@dataclass
class Rhythm:
    """What an unbroken run was seen to do.

    Attributes:
        seconds: How long it took.
        moments: Where files of a checkpoint changed: its number, and seconds since its save began.
    """

    seconds: float
    moments: list[tuple[int, float]]


def run_unbroken(run: Run) -> Rhythm | None:
    """What the run does when it is left alone; None if it fails."""
    attempt, moments, iteration, changed = Attempt(run), [], 0, 0.0
    begun = 0.0
    while attempt.goes_on(0.001) and attempt.seconds < RUN_SECONDS:
        now, before, changed = attempt.seconds, changed, attempt.saves.last_change()
        if attempt.saves.iteration != iteration:
            iteration, begun = attempt.saves.iteration, now
        if iteration and changed != before:
            moments.append((iteration, now - begun))
    seconds = attempt.seconds
    attempt.wait(0)
    return None if any(attempt.codes) else Rhythm(seconds, moments)


def wait_for_a_moment(attempt: Attempt, rhythm: Rhythm, dice: random.Random) -> None:
    """Until a random moment of the run or, as often, one of the saves that are left of it.

    A run that has saved all is left alone: it would be killed as it starts for ever.
    """
    left = [moment for moment in rhythm.moments if moment[0] > attempt.first_step.saved]
    if not left:
        end = RUN_SECONDS
    elif dice.random() < 0.5:
        iteration, delay = dice.choice(left)
        while attempt.goes_on(0.0005) and attempt.saves.iteration < iteration:
            pass
        end = attempt.seconds + delay
    else:
        end = dice.uniform(0, rhythm.seconds)
    while attempt.goes_on(0.0005) and attempt.seconds < end:
        pass


def kill_once(attempt: Attempt, rhythm: Rhythm, dice: random.Random, tally: Tally) -> None:
    """Wait for a random moment and kill a random rank, unless the run is over before.

    Args:
        attempt: What runs.
        rhythm: Of the run when it is unbroken.
        dice: Decides.
        tally: Is told.
    """
    folder = attempt.run.folder
    wait_for_a_moment(attempt, rhythm, dice)
    was_saving, saved = attempt.saves.is_saving(), saved_step(attempt.run.checkpoints)
    if not attempt.kill(dice):
        return
    killed = attempt.seconds
    tally.kills += 1
    tally.in_saves += was_saving
    attempt.end(ALONE_SECONDS)
    if not attempt.wait(PATIENCE_SECONDS):
        tally.problems.append(f"{folder}: a rank did not end in {PATIENCE_SECONDS:.0f} s")
    if saved_step(attempt.run.checkpoints) < saved:
        tally.problems.append(f"{folder}: the checkpoint of step {saved} is lost")
    tally.slowest_end = max(tally.slowest_end, attempt.seconds - killed)


def differences(folder: Path, unbroken: Path) -> Iterator[str]:
    """What is not equal, bit by bit, in two runs that are through."""
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        found, expected = (list(_rows(at / name)) for at in (folder, unbroken))
        if found != expected:
            yield f"{folder / name} has other rows than {unbroken / name}"
    one, other = (_latest(at / "checkpoints") for at in (folder, unbroken))
    if one.name != other.name:
        yield f"{folder} ends with {one.name}, {unbroken} with {other.name}"
        return
    names = {str(p.relative_to(at)) for at in (one, other) for p in at.rglob("*") if p.is_file()}
    # Written by pickle, with names that are new each time.
    for name in sorted(names - {STATE_FILE, ".metadata"}):
        pair = (one / name, other / name)
        if not all(path.exists() for path in pair):
            yield f"{name} is in one of {one}, {other} only"
        elif pair[0].read_bytes() != pair[1].read_bytes():
            yield f"{pair[0]} has other bytes than {pair[1]}"
    if _state(one) != _state(other):
        yield f"{one / STATE_FILE} says something else than {other / STATE_FILE}"


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for row in read_jsonl(path):
            yield {name: value for name, value in row.items() if not name.startswith("time/")}


def _latest(root: Path) -> Path:
    iteration = read_pointer(root)
    assert iteration is not None, f"{root / POINTER_FILE} is missing"
    return iteration_folder(root, iteration)


def _state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    del state["wall_seconds"], state["config"]["output_dir"]
    return state


def run_broken(run: Run, unbroken: Path, rhythm: Rhythm, dice: random.Random, tally: Tally) -> None:
    """Start a run until it is through, each time with a kill while there are some left.

    It must then equal the one in `unbroken`; what is wrong goes to the tally.
    """
    while True:
        attempt, kills = Attempt(run), tally.kills
        if kills < tally.goal:
            kill_once(attempt, rhythm, dice, tally)
        is_through = attempt.wait(RUN_SECONDS) and not any(attempt.codes)
        tally.take(attempt)
        if is_through:
            tally.problems += differences(run.folder, unbroken)
            return
        if tally.kills == kills:
            tally.problems.append(f"{run.folder}: exit codes {attempt.codes} without a kill")
            return


def break_until(recipe: str, backend: str, kills: int, dice: random.Random, tally: Tally) -> None:
    """Run a recipe broken, again and again, until there are `kills` more."""
    unbroken = Run(recipe, backend, FOLDER / recipe / "unbroken")
    rhythm = run_unbroken(unbroken)
    if rhythm is None:
        tally.problems.append(f"{unbroken.folder}: fails even unbroken, see {unbroken.log}")
        return
    print(f"{recipe}: {rhythm.seconds:.0f} s unbroken", flush=True)
    tally.goal, number, failures = tally.kills + kills, 0, 0
    while tally.kills < tally.goal and failures < MAX_FAILURES:
        number += 1
        run = replace(unbroken, folder=FOLDER / recipe / f"broken_{number}")
        kills, in_saves, problems = tally.kills, tally.in_saves, len(tally.problems)
        began = time.monotonic()
        run_broken(run, unbroken.folder, rhythm, dice, tally)
        kills, in_saves = tally.kills - kills, tally.in_saves - in_saves
        is_equal = len(tally.problems) == problems
        verdict = "equal" if is_equal else f"PROBLEM, see {run.log}"
        print(f"{run.folder}: {kills} kills, {in_saves} in saves; {verdict}", flush=True)
        if kills == 0:
            # The moment came too late: the machine is faster than it was.
            rhythm.seconds = min(rhythm.seconds, time.monotonic() - began)
        if is_equal:
            shutil.rmtree(run.folder, ignore_errors=True)
        else:
            failures += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=9, help="over all recipes (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (%(default)s)")
    parser.add_argument("--recipes", nargs="+", choices=SMALL, default=tuple(SMALL))
    parser.add_argument("--backend", choices=SPLIT, default="megatron", help="(%(default)s)")
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    shutil.rmtree(FOLDER, ignore_errors=True)
    task = [sys.executable, "tools/make_addition_task.py", "--output", str(TASK)]
    subprocess.run([*task, "--repeats", "1"], check=True)
    (TASK / "zero.json").write_text(json.dumps(ZERO_JSON), encoding="utf-8")
    dice, tally = random.Random(options.seed), Tally()
    share, rest = divmod(options.kills, len(options.recipes))
    for index, recipe in enumerate(options.recipes):
        break_until(recipe, options.backend, share + (index < rest), dice, tally)
    print(tally)
    return int(bool(tally.problems))


if __name__ == "__main__":
    sys.exit(main())
