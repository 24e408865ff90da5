import logging

import pytest

from rl_megatron.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NumericsError,
    RolloutError,
)
from rl_megatron.runtime import launch as launching
from rl_megatron.runtime.stopping import Requeue


class Left(BaseException):
    """The process has ended with a code."""


@pytest.fixture(autouse=True)
def stopped(monkeypatch):
    """The process and its logging are left alone; what `stop` was called with."""
    calls = []

    def leave(code):
        raise Left(code)

    monkeypatch.setattr(launching, "leave", leave)
    monkeypatch.setattr(launching.log, "setup_logging", lambda rank: None)
    monkeypatch.setattr(launching.log, "silence_megatron_warnings", lambda: None)
    monkeypatch.setattr(launching.processes, "stop", lambda: calls.append(()))
    return calls


def exit_code(error):
    def train(run):
        raise error

    with pytest.raises(Left) as left:
        launching.launch(train, None)
    return left.value.args[0]


def test_a_run_that_ends_well_leaves_the_job(stopped):
    seen = []
    launching.launch(seen.append, "the run")
    assert seen == ["the run"] and stopped == [()]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError, 2),
        (DataError, 2),
        (CheckpointError, 2),
        (RolloutError, 1),
        (NumericsError, 1),
    ],
)
def test_an_error_of_ours_is_its_message_and_a_code(error, code, caplog, stopped):
    with caplog.at_level(logging.INFO):
        assert exit_code(error("this is wrong")) == code
    (record,) = caplog.records
    assert (record.getMessage(), record.exc_info) == ("this is wrong", None)
    assert record.levelno == logging.ERROR
    assert stopped == []  # The other ranks may be in a collective.


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()])
def test_anything_else_comes_with_its_traceback(error, caplog):
    assert exit_code(error) == 1
    assert caplog.records[0].exc_info[1] is error


def test_a_run_that_wants_to_go_on_says_so_by_its_code(caplog):
    with caplog.at_level(logging.INFO):
        assert exit_code(Requeue("saved step 3")) == 75
    assert [record.getMessage() for record in caplog.records] == ["saved step 3"]


def test_one_rank_speaks_of_a_mistake(monkeypatch, caplog):
    monkeypatch.setenv("RANK", "3")
    with caplog.at_level(logging.INFO):
        exit_code(DataError("this is wrong"))
    assert [record.levelno for record in caplog.records] == [logging.INFO]
