"""The runs of tools/chaos.py: small ones of every recipe, started on two ranks."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rl_megatron.runtime.resume import CHECKPOINTS
from tools.chaos_watch import FirstStep, SaveWatch

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path("runs/chaos")
TASK = FOLDER / "task"
RANKS = 2

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
    "checkpoint.keep_last=2",
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


@dataclass(frozen=True)
class Run:
    """A recipe, how it is split, and the run folder."""

    recipe: str
    backend: str
    folder: Path

    @property
    def checkpoints(self) -> Path:
        """`checkpoints/` of the run folder."""
        return self.folder / CHECKPOINTS

    @property
    def log(self) -> Path:
        """What all ranks of all attempts have said."""
        return self.folder.with_suffix(".log")

    def command(self) -> list[str]:
        """How each rank is started."""
        script = [f"recipes/{self.recipe}/train.py", f"recipes/{self.recipe}/quickstart.yaml"]
        settings = [*COMMON, *SMALL[self.recipe], *SPLIT[self.backend]]
        return [sys.executable, *script, *settings, f"output_dir={self.folder}"]


class Attempt:
    """The ranks of one start of a run."""

    def __init__(self, run: Run) -> None:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = server.getsockname()[1]
        self.run = run
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        self.saves = SaveWatch(run.checkpoints)
        self.first_step = FirstStep(run.folder)
        self._began = time.monotonic()
        self._log = run.log.open("a", encoding="utf-8")
        self._said_before = self._log.tell()
        self.ranks = [
            subprocess.Popen(
                run.command(),
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
        return time.monotonic() - self._began

    def goes_on(self, nap_seconds: float = 0.01) -> bool:
        """Whether a rank still runs, after a nap; what the run does is looked at meanwhile."""
        time.sleep(nap_seconds)
        self.saves.look()
        self.first_step.look(self.seconds)
        return any(rank.poll() is None for rank in self.ranks)

    def kill(self, dice: random.Random) -> bool:
        """Kill a random rank of those that still run; whether there was one."""
        living = [rank for rank in self.ranks if rank.poll() is None]
        if not living:
            return False
        victim = dice.choice(living)
        victim.kill()
        # It may have ended by itself at the last moment.
        return victim.wait() == -signal.SIGKILL

    def end(self, alone_seconds: float) -> None:
        """As a launcher does once a rank has failed: leave the others a moment, then end them."""
        deadline = time.monotonic() + alone_seconds
        while self.goes_on() and time.monotonic() < deadline:
            pass
        for rank in self.ranks:
            rank.terminate()

    def wait(self, patience_seconds: float) -> bool:
        """Whether all ranks end in this time; those that do not are killed."""
        deadline = time.monotonic() + patience_seconds
        while (goes_on := self.goes_on()) and time.monotonic() < deadline:
            pass
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        self._log.close()
        return not goes_on

    @property
    def codes(self) -> list[int | None]:
        """Exit codes by rank."""
        return [rank.returncode for rank in self.ranks]

    def said(self) -> str:
        """What its ranks have said."""
        with self.run.log.open("rb") as log:
            log.seek(self._said_before)
            return log.read().decode(errors="replace")
