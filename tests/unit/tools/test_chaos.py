"""What the program that kills runs sees of them."""

import json
import os
import time
from types import SimpleNamespace

import pytest

from tools import chaos_watch
from tools.chaos import Rhythm, Tally, wait_for_a_moment
from tools.chaos_watch import FirstStep, SaveWatch, saved_step


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "checkpoints"
    (folder / "iter_0000003.11-22.tmp").mkdir(parents=True)
    (folder / "iter_0000001.deleted.tmp").mkdir()
    return folder


def age(root):
    """As if nothing had changed for a while."""
    before = time.time() - 2 * chaos_watch.QUIET_SECONDS
    for at, _, names in os.walk(root):
        for path in (at, *(f"{at}/{name}" for name in names)):
            os.utime(path, (before, before))


def test_a_save_begins_with_a_new_folder_aside(root):
    saves = SaveWatch(root)
    saves.look()
    # What an earlier attempt left, and what is being deleted, are no saves of this one.
    (root / "iter_0000002.deleted.tmp").mkdir()
    saves.look()
    assert saves.iteration == 0
    (root / "iter_0000003.33-44.tmp").mkdir()
    saves.look()
    assert saves.iteration == 3


def test_a_save_is_under_way_while_something_changes(root):
    (root / "iter_0000003.11-22.tmp/hf").mkdir()
    piece, name = root / "iter_0000003.11-22.tmp/hf/piece", root / "iter_0000003"
    pointer, doomed = root / "latest_checkpointed_iteration.txt", root / "iter_0000001.deleted.tmp"
    for change in (
        lambda: piece.write_text("a"),
        lambda: piece.write_text("ab"),
        lambda: (root / "iter_0000003.11-22.tmp").rename(name),
        lambda: pointer.write_text("3\n"),
        doomed.rmdir,
    ):
        age(root)
        assert not SaveWatch(root).is_saving()
        change()
        assert SaveWatch(root).is_saving()


def test_before_the_first_save_nothing_is_saved(tmp_path):
    saves = SaveWatch(tmp_path / "checkpoints")
    saves.look()
    assert (saves.iteration, saves.last_change(), saves.is_saving()) == (0, 0.0, False)


def test_the_step_that_an_attempt_goes_on_from(root):
    assert saved_step(root) == 0
    (root / "iter_0000002").mkdir()
    assert saved_step(root) == 2
    (root / "iter_0000003").mkdir()
    (root / "latest_checkpointed_iteration.txt").write_text("2\n")
    assert saved_step(root) == 2
    (root / "latest_checkpointed_iteration.txt").write_text("7\n")
    assert saved_step(root) == 3


def rows(*steps):
    return "".join(json.dumps({"step": step}) + "\n" for step in steps)


def test_the_first_new_step_of_an_attempt(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(rows(1, 2, 3))
    (tmp_path / "checkpoints/iter_0000002").mkdir(parents=True)
    first_step = FirstStep(tmp_path)
    first_step.look(1.0)
    # The rows of an earlier attempt are none of this one, and neither are those that it keeps.
    new = tmp_path / "metrics.jsonl.tmp"
    new.write_text(rows(1, 2))
    new.replace(metrics)
    first_step.look(2.0)
    assert (first_step.saved, first_step.seconds) == (2, None)
    with metrics.open("a") as file:
        file.write(rows(3))
    first_step.look(3.0)
    first_step.look(4.0)
    assert first_step.seconds == 3.0


def attempt(saved, seconds, said):
    first_step = SimpleNamespace(saved=saved, seconds=seconds)
    return SimpleNamespace(
        first_step=first_step, said=lambda: said, run=SimpleNamespace(folder="runs/x")
    )


def test_the_slowest_first_step_is_that_of_a_resumed_attempt():
    tally = Tally(kills=3, in_saves=2, slowest_end=1.25)
    tally.take(attempt(0, 90.0, ""))  # from the beginning
    tally.take(attempt(2, None, ""))  # killed before
    for seconds in (6.0, 7.5, 7.0):
        tally.take(attempt(2, seconds, "the run goes on after step 2, from ..."))
    assert str(tally).splitlines() == [
        "3 kills, 2 of them while a checkpoint was written, published or deleted",
        "the other ranks ended within 1.2 s of a kill",
        "3 attempts went on from a checkpoint: first new step within 7.5 s of their start",
        "0 problems",
    ]


def test_an_attempt_that_goes_on_from_elsewhere_is_a_problem():
    tally = Tally()
    tally.take(attempt(12, 6.0, "the run goes on after step 1, from ..."))
    assert tally.problems == ["runs/x: does not go on after step 12"]


class Scripted:
    """An attempt that goes on from step 1, begins a save every second, and ends after ten."""

    def __init__(self):
        self.seconds = 0.0
        self.first_step = SimpleNamespace(saved=1)
        self.saves = SimpleNamespace(iteration=0)

    def goes_on(self, nap_seconds):
        self.seconds += nap_seconds
        self.saves.iteration = 1 + int(self.seconds)
        return self.seconds < 10


@pytest.mark.parametrize(
    ("is_random", "moments", "expected"),
    [
        (0.4, [(1, 0.5), (3, 0.25)], 2.25),
        (0.6, [(1, 0.5), (3, 0.25)], 7.0),
        (0.4, [(90, 0.5)], 10.0),
        # All that there is to save has been saved: it is left alone to its end.
        (0.4, [(1, 0.5)], 10.0),
        (0.6, [(1, 0.5)], 10.0),
    ],
)
def test_the_moment_of_a_kill(is_random, moments, expected):
    """Of a save that is still to come, or any of the run."""
    dice = SimpleNamespace(
        random=lambda: is_random, choice=lambda left: left[0], uniform=lambda low, high: 0.7 * high
    )
    attempt = Scripted()
    wait_for_a_moment(attempt, Rhythm(10.0, moments), dice)
    assert attempt.seconds == pytest.approx(expected, abs=0.01)
