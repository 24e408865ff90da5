import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_megatron.errors import ConfigError
from rl_megatron.metrics.writer import MetricsWriter


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_line_per_step_is_on_disk_before_the_writer_is_closed(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "run", rank=0)
    writer.write(1, {"loss/total": 0.5, "rewards/mean": 1.0})
    writer.write(2, {"loss/total": 0.25})
    assert lines(tmp_path / "run") == [
        {"step": 1, "loss/total": 0.5, "rewards/mean": 1.0},
        {"step": 2, "loss/total": 0.25},
    ]
    writer.close()


def test_a_value_that_is_not_finite_becomes_null_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = MetricsWriter(tmp_path, rank=0)
    with caplog.at_level(logging.WARNING):
        writer.write(7, {"loss/total": float("nan"), "kl": float("inf"), "fine": 1.0})
    writer.close()
    assert lines(tmp_path) == [{"step": 7, "loss/total": None, "kl": None, "fine": 1.0}]
    assert "step 7: loss/total is nan" in caplog.text
    assert "step 7: kl is inf" in caplog.text
    assert "fine" not in caplog.text


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "run", rank=1, tensorboard=True, wandb_project="p")
    writer.write(1, {"loss/total": 0.5})
    writer.close()
    assert not (tmp_path / "run").exists()


def test_a_new_run_does_not_continue_the_file_of_an_old_one(tmp_path: Path) -> None:
    for loss in (0.5, 0.25):
        writer = MetricsWriter(tmp_path, rank=0)
        writer.write(1, {"loss/total": loss})
        writer.close()
    assert lines(tmp_path) == [{"step": 1, "loss/total": 0.25}]


def test_a_resumed_run_drops_the_steps_it_repeats_and_a_half_written_line(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, rank=0)
    for step in (1, 2, 3):
        writer.write(step, {"loss/total": float(step)})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss/to')
    writer = MetricsWriter(tmp_path, rank=0, resumed_from=2)
    writer.write(3, {"loss/total": 30.0})
    writer.close()
    assert [line["loss/total"] for line in lines(tmp_path)] == [1.0, 2.0, 30.0]


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, rank=0, tensorboard=True)
    writer.write(1, {"loss/total": 0.5})
    writer.write(2, {"loss/total": 0.25})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss/total")] == [(1, 0.5), (2, 0.25)]


def test_missing_wandb_names_the_setting_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"logging\.wandb_project is 'mine'.*pip install wandb"):
        MetricsWriter(tmp_path, rank=0, wandb_project="mine")


def test_attempts_of_a_run_are_one_run_on_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Run:
        def finish(self) -> None: ...

    def init(**arguments: object) -> Run:
        asked.append(arguments)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for folder in ("one", "one", "two"):
        MetricsWriter(tmp_path / folder, rank=0, wandb_project="mine", run_name="a").close()
    first, again, other = asked
    assert first == again and first["resume"] == "allow"
    assert other["id"] != first["id"]
