"""Recipes run from their command line on the addition task, in a few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_megatron.config import DPORun, GRPORun, KTORun, RewardModelRun, SFTRun
from tests.helpers.pool import ROOT

RUN_CLASSES = {
    "sft": SFTRun,
    "reward_model": RewardModelRun,
    "grpo": GRPORun,
    "dpo": DPORun,
    "kto": KTORun,
}

# Groups of a model that has learned nothing differ in it, as they do not in right answers.
REWARD = """
def digits(prompt, response, answer):
    return sum(character.isdigit() for character in response) / 8
"""

KL_IN_LOSS = ("loss.use_kl_loss=true", "loss.kl_loss_coef=0.05", "loss.kl_loss_type=k3")
KL_IN_REWARD = (
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_coef=0.1",
    "algorithm.kl_ctrl={type: adaptive, target_kl: 0.001, ema_decay: 0}",
    "train.num_rollout_batches=3",
    "train.ppo_epochs=1",
    "evaluation=",
)
PREFERENCES = ("preferences.jsonl", "heldout_preferences.jsonl")
TENSOR_2 = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")


def zero(stage: int, folder: Path) -> tuple[str, ...]:
    """Settings of a run under ZeRO that shares small weights too, by a file in `folder`."""
    path = folder / "zero.json"
    path.write_text('{"zero_optimization": {"stage3_param_persistence_threshold": 0}}')
    return (
        "backend=deepspeed",
        f"deepspeed.zero_stage={stage}",
        f"deepspeed.config_path={path}",
    )


def settings(recipe: str, task: Path) -> dict[str, Any]:
    """What the run of a recipe says, on the task in the folder `task`."""
    held_out = {"path": str(task / "heldout.jsonl")}
    evaluation = {"data": held_out, "max_rows": 32, "batch_size": 32, "max_response_tokens": 12}
    run: dict[str, Any] = {
        "name": f"e2e-{recipe}",
        "seed": 3,
        "model": {"path": str(task / "model"), "make_vocab_size_divisible_by": 8},
        # Where a gradient is all but zero, Adam would turn its rounding into a full step.
        "optimizer": {"lr": 1e-3, "adam_eps": 1e-4},
    }
    if recipe == "grpo":
        return run | {
            "data": {"train": {"path": str(task / "prompts.jsonl")}, "max_prompt_length": 32},
            "rollout": {"prompts_per_batch": 4, "group_size": 4, "max_response_tokens": 8},
            "rewards": [
                {"name": "answer_tag"},
                {"name": "python", "path": f"{task / 'reward.py'}:digits", "weight": 2.0},
            ],
            "train": {"num_rollout_batches": 2, "mini_batch_size": 8, "ppo_epochs": 2},
            "evaluation": evaluation,
        }
    rows = ("sft.jsonl", "sft.jsonl") if recipe == "sft" else PREFERENCES
    if recipe in ("dpo", "kto"):
        run["reference"] = {"cache": str(task / "ref_cache")}
    more = {"unpair": True} if recipe == "kto" else {}
    run |= {
        "data": {
            "train": {"path": str(task / rows[0])} | more,
            "eval": {"path": str(task / rows[1])} | more,
            "max_length": 64,
        },
        "train": {"num_steps": 4, "global_batch_size": 8, "save_interval": 2},
    }
    if recipe == "reward_model":
        return run | {"loss": {"center_rewards_coefficient": 0.01}}
    return run | {
        "evaluation": evaluation | {"rewards": [{"name": "answer_tag"}]},
    }


@dataclass(frozen=True)
class Finished:
    """A run that has ended: its folder, what it was given, and its process."""

    folder: Path
    words: tuple[str, ...]
    done: subprocess.CompletedProcess[str]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl."""
        return read_rows(self.folder / "metrics.jsonl")

    @property
    def log(self) -> str:
        """What rank 0 logged in the first attempt."""
        return (self.folder / "logs/attempt_1/rank_0.log").read_text(encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects in a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_yaml(recipe: str, task: Path) -> Path:
    """The run file of a recipe on the task; JSON is YAML."""
    path = task / f"{recipe}.yaml"
    path.write_text(json.dumps(settings(recipe, task)), encoding="utf-8")
    return path


def execute(script: str, *words: str | Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """A recipe or tool by python, or by torchrun if there are ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(torchrun if ranks > 1 else []), script, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def run_recipe(recipe: str, task: Path, folder: Path, *overrides: str, ranks: int = 1) -> Finished:
    """The finished run; it must have ended well."""
    words = (str(task / f"{recipe}.yaml"), f"output_dir={folder}", *overrides)
    done = execute(f"recipes/{recipe}/train.py", *words, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return Finished(folder, words, done)
