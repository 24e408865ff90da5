"""The first rank to fail is heard, whatever the others say of it."""

import logging
import os

import pytest

from rl_megatron import log
from rl_megatron.errors import DataError
from rl_megatron.runtime import failure


@pytest.fixture
def attempt(tmp_path):
    yield log.log_to_run_folder(tmp_path, 1, rank=0).parent
    root = logging.getLogger()
    for handler in [h for h in root.handlers if h.name == "rl_megatron.file"]:
        root.removeHandler(handler)
        handler.close()


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_a_rank_says_what_it_failed_of_and_writes_it_down(attempt, caplog):
    failure.report(3, raised(ValueError("a bug")))
    (record,) = caplog.records
    assert record.getMessage() == "rank 3 failed" and record.levelno == logging.ERROR
    written = (attempt / "failure_rank_3.txt").read_text()
    assert "in raised" in written and written.endswith("ValueError: a bug\n")


def test_rank_0_ends_with_the_words_of_the_first_that_failed(attempt, caplog):
    for rank, nanoseconds, text in ((2, 20, "lost contact\n"), (1, 10, "ValueError: the cause\n")):
        path = attempt / f"failure_rank_{rank}.txt"
        path.write_text(text)
        os.utime(path, ns=(nanoseconds, nanoseconds))
    with caplog.at_level(logging.WARNING):
        failure.report(0, raised(RuntimeError("Connection closed by peer")))
        failure.report(3, raised(RuntimeError("Connection closed by peer")))
    assert [r.getMessage() for r in caplog.records] == [
        "rank 1 failed, and so the job ends:\nValueError: the cause"
    ]


def test_a_mistake_that_one_rank_finds_alone_is_told_by_rank_0(attempt, caplog):
    with caplog.at_level(logging.WARNING):
        failure.report(1, raised(DataError("rows.jsonl is missing on this node")))
        assert caplog.records == []
        failure.report(0, raised(RuntimeError("Connection closed by peer")))
    assert "rows.jsonl is missing on this node" in caplog.records[0].getMessage()


def test_before_there_is_a_folder_nothing_is_written(tmp_path, caplog):
    assert log.attempt_folder() is None
    failure.report(1, raised(ValueError("early")))
    assert caplog.records[0].getMessage() == "rank 1 failed"
