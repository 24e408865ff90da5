import json
import logging

import pytest
import torch

from rl_megatron.checkpoint.publish import read_pointer
from rl_megatron.config import GRPORun, SFTRun, build_run, dump_run
from rl_megatron.errors import ConfigError
from rl_megatron.interfaces.records import Prompt, Rollout
from rl_megatron.metrics.jsonl import read_jsonl
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process
from rl_megatron.runtime import job as jobs
from rl_megatron.runtime.job import Job
from tests.helpers.minimal_runs import GRPO, SFT, with_settings


class Policy:
    """Saves one small file."""

    def save(self, folder):
        (folder / "weights").write_text("1 2 3")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """One process without a job; the log files of runs are closed again."""
    process = Process(Layout(), 0, torch.device("cpu"))
    monkeypatch.setattr(jobs, "start_process", lambda run, world_size: process)
    yield process
    root = logging.getLogger()
    for handler in [h for h in root.handlers if h.name == "rl_megatron.file"]:
        root.removeHandler(handler)
        handler.close()


def sft(folder, **settings):
    return build_run(
        SFTRun, with_settings(SFT, output_dir=str(folder), logging__tensorboard=False, **settings)
    )


def start(run):
    return Job.start(run, "sft", {"loss": "loss/total"})


def test_a_run_from_its_start_to_its_end(tmp_path, task):
    run = sft(tmp_path / "run", model__path=str(task / "model"), train__log_interval=2)
    with start(run) as job:
        assert (job.folder / "config.yaml").read_text() == dump_run(run)
        for number in job.rounds(5):
            with job.phase("update") as span:
                span.tokens = 10
            job.record(number, {"loss/total": 1.0 / number})
            if job.is_due(2):
                job.save(number, Policy(), extra={"kl": 0.5})
        job.record_evaluation(5, {"evaluation/greedy_reward": 0.5})
        job.record_evaluation(5, {})
    rows = list(read_jsonl(job.folder / "metrics.jsonl"))
    # Every second round, the last one, and the evaluation that found something.
    assert [row["step"] for row in rows] == [2, 4, 5, 5]
    assert rows[0]["loss/total"] == 0.5
    assert {"time/step_seconds", "time/update_seconds"} <= rows[0].keys()
    assert rows[3] == {"step": 5, "evaluation/greedy_reward": 0.5}
    assert (job.folder / "curve.png").exists()
    assert not (job.folder / "rollouts.jsonl").exists()

    root = job.folder / "checkpoints"
    saved = sorted(path.name for path in root.glob("iter_*"))
    assert saved == ["iter_0000002", "iter_0000004", "iter_0000005"]
    assert read_pointer(root) == 5
    state = json.loads((root / saved[-1] / "run_state.json").read_text())
    assert state.pop("wall_seconds") > 0
    assert state == {"step": 5, "extra": {"kl": 0.5}}
    for name in ("config.json", "tokenizer.json"):
        kept = root / saved[-1] / "hf" / name
        assert kept.read_bytes() == (task / "model" / name).read_bytes()


@pytest.mark.parametrize(
    ("interval", "due"), [(0, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])]
)
def test_what_is_due_when(interval, due, tmp_path):
    with start(sft(tmp_path)) as job:
        found = []
        for number in job.rounds(5):
            job.record(number, {})
            if job.is_due(interval):
                found.append(number)
    assert found == due


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path):
    with start(sft(tmp_path)) as job:
        for number in job.rounds(1):
            job.record(number, {"loss/total": 1.0})
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    said = rf"output_dir {tmp_path} holds a run already .*name another output_dir, or remove"
    with pytest.raises(ConfigError, match=said), start(sft(tmp_path, seed=1)):
        raise AssertionError("it has started")
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_checkpoints_without_metrics_are_a_run_too(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="holds a run already"), start(sft(tmp_path)):
        raise AssertionError("it has started")


def test_an_attempt_without_a_step_can_be_made_again(tmp_path):
    with pytest.raises(ValueError, match="broken data"), start(sft(tmp_path, seed=1)):
        raise ValueError("broken data")
    run = sft(tmp_path, seed=2)
    with start(run) as job:
        for number in job.rounds(1):
            job.record(number, {"loss/total": 1.0})
    assert (tmp_path / "config.yaml").read_text() == dump_run(run)
    assert len(list(read_jsonl(tmp_path / "metrics.jsonl"))) == 1
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"attempt_1", "attempt_2"}


def test_rollouts_are_written_as_many_as_asked_for(tmp_path):
    settings = with_settings(GRPO, output_dir=str(tmp_path), logging__rollouts_per_step=2)
    prompt = Prompt(3, (1,), "2+3=", "5")
    rollouts = [Rollout(prompt, i, (1,), (0.0,), "stop", "5", 0) for i in range(4)]
    with start(build_run(GRPORun, settings)) as job:
        for number in job.rounds(1):
            job.record_rollouts(number, rollouts, [1.0, 0.0, 1.0, None])
            job.record(number, {"loss/total": 1.0})
    written = list(read_jsonl(tmp_path / "rollouts.jsonl"))
    assert [(row["sample_index"], row["reward"]) for row in written] == [(0, 1.0), (2, 1.0)]
