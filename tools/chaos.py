"""Kills runs at random moments and checks that they end as if nothing had happened.

    python tools/chaos.py --kills 100
    python tools/chaos.py --kills 6 --recipes grpo --seed 3
    python tools/chaos.py --kills 6 --backend deepspeed      # ZeRO stage 3

Each recipe runs once unbroken, on the quickstart's task. Then it runs again and again, and in every
attempt one random rank gets SIGKILL at a random moment, half of the time while a checkpoint is
being written; the other ranks must end by themselves. Once a run is through, its weights,
optimizer, metrics and rollouts must be those of the unbroken run, bit by bit. Ends with 1 on any
difference. Everything is in runs/chaos, which is made anew each time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rl_megatron.checkpoint.publish import POINTER_FILE, iteration_folder, read_pointer  # noqa: E402
from rl_megatron.checkpoint.run_state import STATE_FILE  # noqa: E402
from rl_megatron.metrics.jsonl import read_jsonl  # noqa: E402

FOLDER = Path("runs/chaos")
TASK = FOLDER / "task"
RECIPES = ("sft", "reward_model", "grpo", "dpo", "kto")
RANKS = 2
# A rank in a collective finds by itself that another one is gone. One that still waits for it to
# join the job does not: a launcher ends it, and so does this program.
ALONE_SECONDS = 10.0
PATIENCE_SECONDS = 60.0

ANSWERED = [f"evaluation.data.path={TASK}/heldout.jsonl", "evaluation.max_rows=16"]
SMALL = {
    "sft": [
        *ANSWERED,
        f"data.train.path={TASK}/sft.jsonl",
        "train.num_steps=12",
        "train.global_batch_size=16",
        "optimizer.lr_warmup_steps=2",
    ],
    "reward_model": [
        f"data.train.path={TASK}/preferences.jsonl",
        f"data.eval.path={TASK}/heldout_preferences.jsonl",
        "train.num_steps=12",
        "train.global_batch_size=8",
    ],
    "dpo": [
        *ANSWERED,
        f"data.train.path={TASK}/preferences.jsonl",
        "data.eval=",
        f"reference.cache={FOLDER}/cache",
        "train.num_steps=12",
        "train.global_batch_size=8",
    ],
    "kto": [
        *ANSWERED,
        f"data.train.path={TASK}/preferences.jsonl",
        "data.eval=",
        f"reference.cache={FOLDER}/kto_cache",
        "train.num_steps=12",
        "train.global_batch_size=8",
    ],
    "grpo": [
        *ANSWERED,
        f"data.train.path={TASK}/prompts.jsonl",
        "train.num_rollout_batches=6",
        "train.mini_batch_size=8",
        "rollout.prompts_per_batch=4",
        "rollout.group_size=4",
        # Responses of a model that knows nothing differ in it.
        "rewards=[{name: length, min_tokens: 8}]",
        "loss.use_kl_loss=true",
        "loss.kl_loss_type=k3",
    ],
}
COMMON = [
    f"model.path={TASK}/model",
    "train.save_interval=1",
    "train.eval_interval=4",
]
SPLIT = {
    "megatron": ["parallel.tensor_model_parallel_size=2"],
    "deepspeed": [
        "backend=deepspeed",
        "deepspeed.zero_stage=3",
        f"deepspeed.config_path={TASK}/zero.json",
    ],
}
# Small weights are shared too: the model has no others.
ZERO_JSON = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


@dataclass
class Tally:
    """What has happened so far."""

    kills: int = 0
    in_saves: int = 0
    slowest_end: float = 0.0
    problems: list[str] = field(default_factory=list)


class Attempt:
    """The ranks of one start of a recipe."""

    def __init__(self, recipe: str, backend: str, folder: Path) -> None:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = server.getsockname()[1]
        script = [f"recipes/{recipe}/train.py", f"recipes/{recipe}/quickstart.yaml"]
        settings = [*COMMON, *SMALL[recipe], *SPLIT[backend], f"output_dir={folder}"]
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()
        self._log = folder.with_suffix(".log").open("a", encoding="utf-8")
        self.ranks = [
            subprocess.Popen(
                [sys.executable, *script, *settings],
                stdout=self._log,
                stderr=self._log,
                env={
                    "OMP_NUM_THREADS": "1",
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(RANKS),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
            )
            for rank in range(RANKS)
        ]

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.began

    @property
    def is_over(self) -> bool:
        """Whether all ranks have ended."""
        return all(rank.poll() is not None for rank in self.ranks)

    def end(self, alone_seconds: float) -> None:
        """As a launcher does once a rank has failed: leave the others a moment, then end them."""
        deadline = time.monotonic() + alone_seconds
        while not self.is_over and time.monotonic() < deadline:
            time.sleep(0.01)
        for rank in self.ranks:
            rank.terminate()

    def wait(self, patience_seconds: float) -> bool:
        """Whether all ranks end in this time; those that do not are killed."""
        deadline = time.monotonic() + patience_seconds
        while not self.is_over and time.monotonic() < deadline:
            time.sleep(0.01)
        ended = self.is_over
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        self._log.close()
        return ended

    @property
    def codes(self) -> list[int | None]:
        """Exit codes by rank."""
        return [rank.returncode for rank in self.ranks]


def run_unbroken(recipe: str, backend: str, folder: Path) -> float:
    """Seconds that the run took."""
    attempt = Attempt(recipe, backend, folder)
    attempt.wait(600)
    if any(attempt.codes):
        raise SystemExit(f"{recipe} fails unbroken: see {folder.with_suffix('.log')}")
    return attempt.seconds


def is_saving(folder: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any((folder / "checkpoints").glob("iter_*.tmp"))


def kill_once(
    attempt: Attempt, folder: Path, seconds: float, dice: random.Random, tally: Tally
) -> None:
    """Wait for a random moment and kill a random rank, unless the run is over before.

    Args:
        attempt: What runs.
        folder: Its run folder.
        seconds: What the run takes unbroken.
        dice: Decides.
        tally: Is told.
    """
    moment, waits_for_save = dice.uniform(0, seconds), dice.random() < 0.5
    while not attempt.is_over and attempt.seconds < moment:
        time.sleep(0.002)
    if waits_for_save:
        while not attempt.is_over and not is_saving(folder):
            time.sleep(0.0005)
        time.sleep(dice.uniform(0, 0.3))
    if attempt.is_over:
        return
    tally.kills += 1
    tally.in_saves += is_saving(folder)
    dice.choice(attempt.ranks).kill()
    killed = time.monotonic()
    attempt.end(ALONE_SECONDS)
    if not attempt.wait(PATIENCE_SECONDS):
        tally.problems.append(f"{folder}: a rank did not end in {PATIENCE_SECONDS:.0f} s")
    tally.slowest_end = max(tally.slowest_end, time.monotonic() - killed)


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


def break_until(recipe: str, backend: str, kills: int, dice: random.Random, tally: Tally) -> None:
    """Run a recipe broken, again and again, until there are `kills` more."""
    unbroken = FOLDER / recipe / "unbroken"
    seconds = run_unbroken(recipe, backend, unbroken)
    print(f"{recipe}: {seconds:.0f} s unbroken", flush=True)
    goal, number = tally.kills + kills, 0
    while tally.kills < goal:
        number += 1
        folder, attempts, before = FOLDER / recipe / f"broken_{number}", 0, tally.kills
        while True:
            attempts += 1
            attempt = Attempt(recipe, backend, folder)
            if tally.kills < goal:
                kill_once(attempt, folder, seconds, dice, tally)
            if attempt.wait(600) and not any(attempt.codes):
                break
            if tally.kills - before < attempts:
                tally.problems.append(f"{folder}: exit codes {attempt.codes} without a kill")
                break
        if attempts == 1 and tally.kills == before:
            # It was killed too late, if at all: the machine is faster than it was.
            seconds = min(seconds, attempt.seconds)
        found = list(differences(folder, unbroken))
        tally.problems += found
        verdict = "differs" if found else "equal"
        print(f"{folder}: {tally.kills - before} kills, {attempts} attempts, {verdict}", flush=True)
        if not found:
            shutil.rmtree(folder, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=9, help="over all recipes (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (%(default)s)")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
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
    print(
        f"{tally.kills} kills, {tally.in_saves} of them while a checkpoint was written; the other "
        f"ranks ended within {tally.slowest_end:.1f} s; {len(tally.problems)} problems"
    )
    for problem in tally.problems:
        print(f"  {problem}")
    return int(bool(tally.problems))


if __name__ == "__main__":
    sys.exit(main())
