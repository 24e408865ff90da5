import errno
import json
import logging
import os
import signal
import time

import pytest
import torch

from rl_megatron.checkpoint.publish import read_pointer
from rl_megatron.checkpoint.run_state import read_run_state
from rl_megatron.config import GRPORun, RewardModelRun, SFTRun, build_run, dump_run
from rl_megatron.config.base import resolved
from rl_megatron.errors import CheckpointError, ConfigError
from rl_megatron.interfaces.records import Prompt, Rollout
from rl_megatron.metrics.jsonl import read_jsonl
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process
from rl_megatron.runtime import job as jobs
from rl_megatron.runtime.job import Job
from rl_megatron.runtime.stopping import Requeue
from tests.helpers.minimal_runs import GRPO, SFT, with_settings


class Save:
    def is_done(self):
        return True

    def finish(self):
        pass


class Policy:
    """Saves the number of steps it has made."""

    def __init__(self):
        self.steps = 0

    def save(self, folder, *, background):
        (folder / "weights").write_text(str(self.steps))
        # What makes a folder one of Megatron's.
        for name in ("metadata.json", ".metadata"):
            (folder / name).write_text("{}")
        return Save()

    def load(self, folder):
        self.steps = int((folder / "weights").read_text())


class Part:
    """Counts along."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


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


@pytest.fixture
def sft(task):
    def make(folder, **settings):
        fixed = {
            "output_dir": str(folder),
            "logging__tensorboard": False,
            "model__path": str(task / "model"),
        }
        return build_run(SFTRun, with_settings(SFT, **fixed | settings))

    return make


def start(run):
    return Job.start(run, "sft", {"loss": "loss/total"})


def train(run, total, before_record=lambda number: None):
    """A recipe; the number of its policy's steps, and those that it made in this attempt."""
    policy, part, made = Policy(), Part(), []
    with start(run) as job:
        job.resume(policy, data=part, nothing=None)
        for number in job.rounds(total):
            policy.steps += 1
            part.count += 10
            before_record(number)
            made.append(number)
            job.record(number, {"loss/total": 1.0 / number})
    assert part.count == 10 * policy.steps
    return policy.steps, made


def steps_written(folder):
    return [row["step"] for row in read_jsonl(folder / "metrics.jsonl")]


def test_a_run_from_its_start_to_its_end(tmp_path, sft, task):
    run = sft(tmp_path / "run", train__log_interval=2, train__save_interval=2)
    policy = Policy()
    with start(run) as job:
        assert (job.folder / "config.yaml").read_text() == dump_run(run)
        assert job.resume(policy, extra=Part()) == 0
        for number in job.rounds(5):
            with job.phase("update") as span:
                span.tokens = 10
            policy.steps += 1
            job.record(number, {"loss/total": 1.0 / number})
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
    state = read_run_state(root / saved[-1])
    assert state.wall_seconds > 0
    assert (state.step, state.round, state.parts) == (5, 5, {"extra": {"count": 0}})
    assert state.config == resolved(run)
    for name in ("config.json", "tokenizer.json"):
        kept = root / saved[-1] / "hf" / name
        assert kept.read_bytes() == (task / "model" / name).read_bytes()


@pytest.mark.parametrize(
    ("interval", "due"), [(0, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])]
)
def test_what_is_due_when(interval, due, tmp_path, sft):
    with start(sft(tmp_path)) as job:
        job.resume(Policy())
        found = []
        for number in job.rounds(5):
            job.record(number, {})
            if job.is_due(interval):
                found.append(number)
    assert found == due


def test_a_run_that_died_goes_on_from_its_last_checkpoint(tmp_path, sft):
    def die(number):
        if number == 6:
            raise MemoryError

    run = sft(tmp_path, train__save_interval=2)
    with pytest.raises(MemoryError):
        train(run, 8, die)
    assert steps_written(tmp_path) == [1, 2, 3, 4, 5]
    assert train(run, 8) == (8, [5, 6, 7, 8])
    assert steps_written(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    # And one that is done has nothing left to do.
    before = {p: p.read_bytes() for p in (tmp_path / "checkpoints").rglob("*") if p.is_file()}
    assert train(run, 8) == (8, [])
    assert {p: p.read_bytes() for p in before} == before
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        "attempt_1",
        "attempt_2",
        "attempt_3",
    }


def test_a_run_that_died_before_its_first_checkpoint_begins_again(tmp_path, sft):
    def die(number):
        if number == 3:
            raise MemoryError

    run = sft(tmp_path)
    with pytest.raises(MemoryError):
        train(run, 4, die)
    assert train(run, 4) == (4, [1, 2, 3, 4])
    assert steps_written(tmp_path) == [1, 2, 3, 4]


def test_what_stopped_the_drift_is_in_the_checkpoint(tmp_path, sft):
    with pytest.raises(ValueError, match="drifts"), start(sft(tmp_path)) as job:  # noqa: PT012
        job.resume(Policy())
        for number in job.rounds(9):
            job.record(number, {})
            if number == 3:
                job.save()
                raise ValueError("drifts")
    assert read_pointer(tmp_path / "checkpoints") == 3


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_sl_04_a_signal_saves_once_after_the_round_and_asks_to_be_started_again(
    number, tmp_path, sft
):
    before = signal.getsignal(number)

    def twice(round):
        if round == 3:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGUSR1)

    run = sft(tmp_path)
    with pytest.raises(Requeue, match="signal asked for it: saved step 3"):
        train(run, 5, twice)
    assert signal.getsignal(number) is before
    root = tmp_path / "checkpoints"
    assert [path.name for path in sorted(root.glob("iter_*"))] == ["iter_0000003"]
    assert train(run, 5) == (5, [4, 5])
    assert steps_written(tmp_path) == [1, 2, 3, 4, 5]


def test_a_signal_in_the_last_round_is_too_late_to_matter(tmp_path, sft):
    def ask(round):
        if round == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    assert train(sft(tmp_path), 2, ask) == (2, [1, 2])
    assert read_pointer(tmp_path / "checkpoints") == 2


def test_time_limits_do_the_same_without_a_signal(tmp_path, sft, monkeypatch):
    run = sft(tmp_path / "duration", checkpoint__exit_duration_in_minutes=1e-9)
    with pytest.raises(Requeue, match="exit_duration_in_minutes is over: saved step 1"):
        train(run, 3)
    run = sft(tmp_path / "allocation", checkpoint__exit_before_end_minutes=10.0)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3600))
    assert train(run, 1) == (1, [1])

    def time_passes(round):
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 300))

    with pytest.raises(Requeue, match="allocation ends soon .*saved step 2"):
        train(run, 3, time_passes)
    said = r"exit_before_end_minutes = 10: the allocation has only [45]\.\d minutes left"
    with pytest.raises(ConfigError, match=said):
        train(run, 3)


def test_an_unwritable_folder_is_found_before_anything_else(tmp_path, sft):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"output_dir .*file/run cannot be written: .*Not a dir"),
        start(sft(tmp_path / "file" / "run")),
    ):
        raise AssertionError("it has started")


def test_a_save_that_fails_says_what_to_do_and_keeps_the_older_one(tmp_path, sft, monkeypatch):
    run = sft(tmp_path, train__save_interval=2)

    def full(number):
        if number == 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    original = Policy.save

    def save(self, folder, **options):
        full(self.steps)
        return original(self, folder, **options)

    monkeypatch.setattr(Policy, "save", save)
    with pytest.raises(CheckpointError, match=r"step 4 in .*No space left .*goes on from the last"):
        train(run, 6)
    monkeypatch.undo()
    assert read_pointer(tmp_path / "checkpoints") == 2


def test_rollouts_are_written_as_many_as_asked_for(tmp_path, task):
    settings = with_settings(
        GRPO,
        output_dir=str(tmp_path),
        logging__rollouts_per_step=2,
        model__path=str(task / "model"),
    )
    prompt = Prompt(3, (1,), "2+3=", "5")
    rollouts = [Rollout(prompt, i, (1,), (0.0,), "stop", "5", 0) for i in range(4)]
    with start(build_run(GRPORun, settings)) as job:
        job.resume(Policy())
        for number in job.rounds(1):
            job.record_rollouts(number, rollouts, [1.0, 0.0, 1.0, None])
            job.record(number, {"loss/total": 1.0})
    written = list(read_jsonl(tmp_path / "rollouts.jsonl"))
    assert [(row["sample_index"], row["reward"]) for row in written] == [(0, 1.0), (2, 1.0)]


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_a_reward_model_is_saved_as_one(backend, tmp_path, task):
    given = {"backend": backend, "model__path": str(task / "model"), "output_dir": str(tmp_path)}
    run = build_run(RewardModelRun, with_settings(SFT, logging__tensorboard=False, **given))
    with Job.start(run, "reward_model", {}) as job:
        job.resume(Policy())
        for number in job.rounds(1):
            job.record(number, {"loss/total": 1.0})
    folder = tmp_path / "checkpoints/iter_0000001"
    described = folder / "hf" if backend == "megatron" else folder
    config = json.loads((described / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert (described / "conversion.json").exists() == (backend == "megatron")
