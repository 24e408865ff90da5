import io
import logging

import pytest
from rich.console import Console

from rl_megatron import log
from rl_megatron.metrics.progress import RunProgress

SHOWN = {"reward": "rewards/mean", "kl": "loss/kl"}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def use_console(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> io.StringIO:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    monkeypatch.setattr(log, "console", lambda: console)
    return out


def test_without_a_terminal_it_logs_every_few_steps_and_the_last(
    monkeypatch: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture
) -> None:
    out = use_console(monkeypatch, terminal=False)
    now = [0.0]
    with RunProgress("grpo", 5, 0, SHOWN, log_interval=2, clock=lambda: now[0]) as progress:
        for step in range(1, 6):
            now[0] += 60.0
            progress.update(step, {"rewards/mean": step / 10, "other": 1.0})
    assert lines.messages == [
        "grpo 2/5  reward 0.2  0:03:00 left",  # 3 steps of 60 seconds
        "grpo 4/5  reward 0.4  0:01:00 left",
        "grpo 5/5  reward 0.5  0:00:00 left",
    ]
    assert out.getvalue() == ""


def test_time_left_counts_only_the_steps_of_this_attempt(
    monkeypatch: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture
) -> None:
    use_console(monkeypatch, terminal=False)
    now = [0.0]
    progress = RunProgress("dpo", 200, 0, SHOWN, first_step=100, clock=lambda: now[0])
    now[0] += 40.0
    progress.update(101, {})
    assert lines.messages == ["dpo 101/200    1:06:00 left"]  # 99 steps of 40 seconds


def test_a_terminal_gets_a_bar_with_the_numbers_and_no_log_lines(
    monkeypatch: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture
) -> None:
    out = use_console(monkeypatch, terminal=True)
    with RunProgress("grpo", 5, 0, SHOWN) as progress:
        progress.update(3, {"rewards/mean": 0.25, "loss/kl": 0.001})
    assert "3/5" in out.getvalue()
    assert "reward 0.25  kl 0.001" in out.getvalue()
    assert lines.messages == []


@pytest.mark.parametrize("terminal", [True, False])
def test_other_ranks_are_silent(
    monkeypatch: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture, terminal: bool
) -> None:
    out = use_console(monkeypatch, terminal)
    with RunProgress("grpo", 5, 1, SHOWN) as progress:
        progress.update(1, {"rewards/mean": 0.1})
    assert out.getvalue() == ""
    assert lines.messages == []
