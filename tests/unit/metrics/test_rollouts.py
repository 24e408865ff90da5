from pathlib import Path

import pytest

from rl_megatron.interfaces.records import Prompt, Rollout
from rl_megatron.metrics.jsonl import read_jsonl
from rl_megatron.metrics.rollouts import RolloutWriter


def make_rollouts(num_prompts: int, group_size: int) -> list[Rollout]:
    return [
        Rollout(
            prompt=Prompt(row_id=row, token_ids=(1, 2), text=f"{row}+1=", answer=str(row + 1)),
            sample_index=sample,
            response_ids=(5, 6, 7),
            rollout_logprobs=(-0.1, -0.2, -0.3),
            finish_reason="stop",
            text=str(row + sample),
            policy_version=3,
        )
        for row in range(num_prompts)
        for sample in range(group_size)
    ]


def test_a_few_rollouts_of_different_prompts_are_written_with_their_rewards(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, rank=0, rollouts_per_step=2)
    rewards = [float(i) for i in range(8)]
    writer.write(5, make_rollouts(num_prompts=2, group_size=4), rewards)
    writer.close()
    rows = list(read_jsonl(tmp_path / "rollouts.jsonl"))
    assert rows[0] == {
        "step": 5,
        "row_id": 0,
        "sample_index": 0,
        "prompt": "0+1=",
        "response": "0",
        "answer": "1",
        "reward": 0.0,
        "finish_reason": "stop",
        "response_tokens": 3,
        "policy_version": 3,
    }
    assert [(row["row_id"], row["reward"]) for row in rows] == [(0, 0.0), (1, 4.0)]


def test_fewer_rollouts_than_asked_for_are_all_written_once(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, rank=0, rollouts_per_step=10)
    writer.write(1, make_rollouts(num_prompts=3, group_size=1), [1.0, None, 0.0])
    writer.close()
    rows = list(read_jsonl(tmp_path / "rollouts.jsonl"))
    assert [(row["row_id"], row["reward"]) for row in rows] == [(0, 1.0), (1, None), (2, 0.0)]


def test_all_rollouts_are_written_where_no_number_is_set(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, rank=0, rollouts_per_step=None)
    writer.write(1, make_rollouts(num_prompts=2, group_size=3), [0.0] * 6)
    writer.close()
    rows = list(read_jsonl(tmp_path / "rollouts.jsonl"))
    assert [(row["row_id"], row["sample_index"]) for row in rows] == [
        (row, sample) for row in range(2) for sample in range(3)
    ]


@pytest.mark.parametrize(("rank", "rollouts_per_step"), [(1, 4), (0, 0)])
def test_nothing_is_written_by_other_ranks_or_when_none_are_asked_for(
    tmp_path: Path, rank: int, rollouts_per_step: int
) -> None:
    writer = RolloutWriter(tmp_path / "run", rank=rank, rollouts_per_step=rollouts_per_step)
    writer.write(1, make_rollouts(num_prompts=1, group_size=1), [1.0])
    writer.close()
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_drops_the_rollouts_of_steps_it_repeats(tmp_path: Path) -> None:
    for resumed_from, steps in ((None, (1, 2, 3)), (1, (2,))):
        writer = RolloutWriter(tmp_path, 0, rollouts_per_step=1, resumed_from=resumed_from)
        for step in steps:
            writer.write(step, make_rollouts(num_prompts=1, group_size=1), [1.0])
        writer.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "rollouts.jsonl")] == [1, 2]
