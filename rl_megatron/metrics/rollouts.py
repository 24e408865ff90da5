"""A few rollouts of each step, to be read by people: `rollouts.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl_megatron.interfaces.records import Rollout
from rl_megatron.metrics.jsonl import JsonlFile

ROLLOUTS_FILE = "rollouts.jsonl"


class RolloutWriter:
    """Writes a sample of the rollouts of each step on rank 0; does nothing on other ranks.

    Args:
        run_folder: Where `rollouts.jsonl` goes; made if missing.
        rank: This process among all of the run.
        rollouts_per_step: How many at most are written per step; 0 for none, None for all.
        resumed_from: As in `MetricsWriter`.
    """

    def __init__(
        self,
        run_folder: Path,
        rank: int,
        rollouts_per_step: int | None,
        resumed_from: int | None = None,
    ) -> None:
        self._rollouts_per_step = rollouts_per_step
        self._file: JsonlFile | None = None
        if rank == 0 and rollouts_per_step != 0:
            run_folder.mkdir(parents=True, exist_ok=True)
            self._file = JsonlFile(run_folder / ROLLOUTS_FILE, resumed_from)

    def write(
        self, step: int, rollouts: Sequence[Rollout], rewards: Sequence[float | None]
    ) -> None:
        """Write rollouts spread evenly over the batch, so that they are of different prompts.

        Args:
            step: The step at whose start they were sampled.
            rollouts: All rollouts of the step.
            rewards: One per rollout; None where it could not be scored.
        """
        assert len(rollouts) == len(rewards), f"{len(rollouts)} rollouts, {len(rewards)} rewards"
        if self._file is None:
            return
        count = len(rollouts)
        if self._rollouts_per_step is not None:
            count = min(self._rollouts_per_step, count)
        for i in (k * len(rollouts) // count for k in range(count)):
            rollout = rollouts[i]
            self._file.append(
                step,
                {
                    "row_id": rollout.prompt.row_id,
                    "sample_index": rollout.sample_index,
                    "prompt": rollout.prompt.text,
                    "response": rollout.text,
                    "answer": rollout.prompt.answer,
                    "reward": rewards[i],
                    "finish_reason": rollout.finish_reason,
                    "response_tokens": len(rollout.response_ids),
                    "policy_version": rollout.policy_version,
                },
            )

    def close(self) -> None:
        """Finish the file."""
        if self._file is not None:
            self._file.close()
