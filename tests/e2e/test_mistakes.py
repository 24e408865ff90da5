"""A mistake ends a recipe with one message, an exit code, and no traceback."""

import pytest

from tests.helpers.recipe_runs import execute, run_recipe

PLAIN = ("backend=torch", "evaluation=", "train.ppo_epochs=1")


def test_all_mistakes_of_a_run_are_told_at_once(task):
    mistakes = ("optimizer.learning_rate=1e-3", "rollout.temperature=0", "rollout.group_size=1")
    words = (*mistakes, "loss.clip_ratio_lo=0.1", "train.mini_batch_size=")
    done = execute("recipes/grpo/train.py", task / "grpo.yaml", *words)
    assert (done.returncode, done.stdout) == (2, "")
    headline, *lines = done.stderr.splitlines()
    assert headline == f"4 mistakes in {task / 'grpo.yaml'}:"
    (misspelt,) = (line for line in lines if "clip_ratio_lo " in line)
    assert "loss.clip_ratio_lo = 0.1 (command line): unknown key; did you mean" in misspelt
    assert "'clip_ratio_low'?" in misspelt
    for said in ("optimizer.learning_rate", "rollout.temperature = 0", "rollout.group_size = 1"):
        assert sum(said in line and "(command line)" in line for line in lines) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_broken_data_names_file_and_line(ranks, task, tmp_path):
    lines = (task / "sft.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines[:4], lines[4][:-3], *lines[5:]]))
    words = (f"data.train.path={tmp_path / 'rows.jsonl'}", f"output_dir={tmp_path / 'run'}")
    done = execute("recipes/sft/train.py", task / "sft.yaml", *words, ranks=ranks)
    assert done.stderr.count(f"ERROR {tmp_path / 'rows.jsonl'}:5: not valid JSON") == 1
    if ranks == 1:  # torchrun has an exit code and a traceback of its own
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
    for rank in range(ranks):
        log = (tmp_path / "run" / "logs" / "attempt_1" / f"rank_{rank}.log").read_text()
        assert "rows.jsonl:5: not valid JSON" in log and "Traceback" not in log


def test_a_reward_of_wrong_shape_then_the_run_again_then_a_third_time(task, tmp_path):
    reward, folder = tmp_path / "mine.py", tmp_path / "run"
    words = (f"rewards=[{{name: python, path: '{reward}:mine'}}]", *PLAIN)
    again = (task / "grpo.yaml", f"output_dir={folder}", *words)

    reward.write_text("def mine(prompt, response, answer):\n    return [0.5]\n")
    done = execute("recipes/grpo/train.py", *again)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "sample 0: the reward is [0.5] (list); a reward must be one number" in done.stderr

    # No step was made, so nothing is lost by taking the folder.
    reward.write_text("def mine(prompt, response, answer):\n    return len(response)\n")
    run = run_recipe("grpo", task, folder, *words)
    assert [row["step"] for row in run.rows] == [2, 4]
    assert "policy/kl_to_reference" not in run.rows[0]

    done = execute("recipes/grpo/train.py", *again, "checkpoint.resume=never")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"output_dir {folder} holds a run already" in done.stderr
    assert len(run.rows) == 2
