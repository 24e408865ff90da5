import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_megatron import log

OURS = logging.getLogger("rl_megatron.runtime")
THEIRS = logging.getLogger("some_library.modeling")


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)
            handler.close()
    root.setLevel(level)


def log_one_of_each() -> None:
    for logger in (OURS, THEIRS):
        logger.debug("%s debug", logger.name)
        logger.info("%s info", logger.name)
        logger.warning("%s warning", logger.name)


def test_rank_0_shows_our_info_and_the_warnings_of_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.setup_logging(rank=0)
    log_one_of_each()
    shown = capsys.readouterr().err
    assert "rl_megatron.runtime info" in shown
    assert "rl_megatron.runtime warning" in shown
    assert "some_library.modeling warning" in shown
    assert "some_library.modeling info" not in shown
    assert "debug" not in shown


def test_other_ranks_show_warnings_with_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup_logging(rank=3)
    log_one_of_each()
    shown = capsys.readouterr().err
    assert "[rank 3] WARNING rl_megatron.runtime warning" in shown
    assert "info" not in shown


def test_setting_up_twice_does_not_show_a_line_twice(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup_logging(rank=0)
    log.setup_logging(rank=0)
    OURS.info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_the_file_of_a_rank_has_everything_from_info_up(tmp_path: Path) -> None:
    log.setup_logging(rank=2)
    path = log.log_to_run_folder(tmp_path, attempt=1, rank=2)
    assert path == tmp_path / "logs/attempt_1/rank_2.log"
    log_one_of_each()
    warnings.warn("a Python warning", UserWarning, stacklevel=1)
    text = path.read_text()
    assert "INFO rl_megatron.runtime: rl_megatron.runtime info" in text
    assert "INFO some_library.modeling: some_library.modeling info" in text
    assert "a Python warning" in text
    assert "debug" not in text


def test_attempts_count_up_from_what_is_on_disk(tmp_path: Path) -> None:
    assert log.next_attempt(tmp_path) == 1
    for name in ("attempt_2", "attempt_10", "attempt_old"):
        (tmp_path / "logs" / name).mkdir(parents=True)
    assert log.next_attempt(tmp_path) == 11


def test_only_the_warnings_about_missing_gpu_libraries_are_silenced() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        log.silence_megatron_warnings()
        both = "Transformer Engine and Apex are not installed. Falling back to Torch optimizers."
        warnings.warn(both, UserWarning, stacklevel=1)
        warnings.warn("Apex is not installed. Falling back to Torch Norm", stacklevel=1)
        warnings.warn("The checkpoint is old", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["The checkpoint is old"]
