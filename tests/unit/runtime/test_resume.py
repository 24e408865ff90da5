"""What a run goes on from, and what it refuses."""

import json
import logging
import shutil

import pytest

from rl_megatron.checkpoint.publish import POINTER_FILE, iteration_folder, read_pointer
from rl_megatron.checkpoint.run_state import STATE_FILE, RunState
from rl_megatron.config import SFTRun, build_run, dump_run
from rl_megatron.config.base import resolved
from rl_megatron.errors import CheckpointError, ConfigError
from rl_megatron.runtime.resume import find_checkpoint
from tests.helpers.minimal_runs import SFT, with_settings


def make_run(folder, **settings):
    return build_run(SFTRun, with_settings(SFT, output_dir=str(folder), **settings))


def checkpoint(run, step):
    """A checkpoint of the run, as far as files tell."""
    root = _root(run)
    folder = iteration_folder(root, step)
    (folder / "hf").mkdir(parents=True)
    for name in ("metadata.json", ".metadata", "hf/config.json"):
        (folder / name).write_text("{}")
    RunState(step, step, 1.0, resolved(run), {"tensor": 2}, {}).write(folder)
    (root / POINTER_FILE).write_text(f"{step}\n")
    return folder


def _root(run):
    from pathlib import Path

    return Path(run.output_dir) / "checkpoints"


def begin(run):
    """What an attempt without a checkpoint leaves."""
    folder = _root(run).parent
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump_run(run))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')


def test_auto_takes_the_last_one_and_nothing_of_nothing(tmp_path):
    run = make_run(tmp_path)
    assert find_checkpoint(run) is None
    checkpoint(run, 5)
    latest = checkpoint(run, 10)
    found = find_checkpoint(run)
    assert (found.folder, found.state.step) == (latest, 10)


def test_never_refuses_a_folder_that_holds_a_run(tmp_path):
    run = make_run(tmp_path, checkpoint__resume="never")
    assert find_checkpoint(run) is None
    begin(run)
    said = rf"output_dir {tmp_path} holds a run already .*name another output_dir, or remove"
    with pytest.raises(ConfigError, match=said):
        find_checkpoint(run)


def test_a_path_is_for_the_first_attempt(tmp_path):
    other = make_run(tmp_path / "other")
    folder = checkpoint(other, 7)
    for path in (tmp_path / "other", folder.parent, folder):
        run = make_run(tmp_path / "run", checkpoint__resume=str(path))
        assert find_checkpoint(run).folder == folder
    own = checkpoint(run, 9)
    assert find_checkpoint(run).folder == own


def test_a_path_must_hold_a_checkpoint_of_a_run(tmp_path):
    for name, word in (("missing", "does not exist"), ("", "holds no checkpoint")):
        run = make_run(tmp_path / "run", checkpoint__resume=str(tmp_path / name))
        with pytest.raises(CheckpointError, match=rf"checkpoint.resume = .*: {word}"):
            find_checkpoint(run)
    converted = checkpoint(make_run(tmp_path / "converted"), 0)
    (converted / STATE_FILE).unlink()
    run = make_run(tmp_path / "run", checkpoint__resume=str(converted))
    with pytest.raises(CheckpointError, match=r"no run can go on from this folder.*model\.path"):
        find_checkpoint(run)


def test_an_earlier_one_of_its_own_is_not_a_path_to_go_on_from(tmp_path):
    run = make_run(tmp_path)
    earlier = checkpoint(run, 5)
    checkpoint(run, 10)
    run = make_run(tmp_path, checkpoint__resume=str(earlier))
    with pytest.raises(ConfigError, match="go back to an earlier one remove the iter_ folders"):
        find_checkpoint(run)


@pytest.mark.parametrize("damage", ["empty pointer", "no pointer", "half folder", "cut state"])
def test_a_broken_last_one_gives_way_to_the_one_before(damage, tmp_path, caplog):
    run = make_run(tmp_path)
    earlier = checkpoint(run, 5)
    latest = checkpoint(run, 10)
    pointer = latest.parent / POINTER_FILE
    if damage == "empty pointer":
        pointer.write_text("")
    if damage == "no pointer":
        pointer.unlink()
    if damage == "half folder":
        (latest / "metadata.json").unlink()
    if damage == "cut state":
        (latest / STATE_FILE).write_text('{"step": ')
    with caplog.at_level(logging.WARNING):
        found = find_checkpoint(run)
    whole = latest if "pointer" in damage else earlier
    assert found.folder == whole
    # The next save finds a pointer that says where the run is.
    assert read_pointer(latest.parent) == found.state.step
    if damage != "no pointer":
        assert f"The run goes on from {whole}" in caplog.text
    if damage == "half folder":
        assert "iter_0000010 lacks metadata.json" in caplog.text


def test_none_whole_is_an_error_and_not_a_new_beginning(tmp_path):
    run = make_run(tmp_path)
    for step in (5, 10):
        (checkpoint(run, step) / STATE_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"iter_0000010/run_state.json cannot be read"):
        find_checkpoint(run)


def test_a_folder_that_is_being_written_is_no_checkpoint(tmp_path):
    run = make_run(tmp_path)
    latest = checkpoint(run, 5)
    shutil.copytree(latest, latest.with_name("iter_0000010.123-4.tmp"))
    assert find_checkpoint(run).folder == latest


def test_what_changes_no_number_may_change(tmp_path):
    folder = checkpoint(make_run(tmp_path), 5)
    run = make_run(
        tmp_path,
        name="another-name",
        train__micro_batch_size=1,
        train__save_interval=7,
        parallel__tensor_model_parallel_size=4,
        logging__tensorboard=False,
        data__train__path="moved/rows.jsonl",
        checkpoint__keep_last=2,
    )
    assert find_checkpoint(run).folder == folder


def test_what_changes_numbers_is_named_and_refused_or_allowed(tmp_path):
    checkpoint(make_run(tmp_path), 5)
    changed = {"optimizer__lr": 3e-4, "train__num_steps": 200, "seed": 4}
    with pytest.raises(ConfigError) as error:
        find_checkpoint(make_run(tmp_path, **changed))
    first, *changes, last = str(error.value).splitlines()
    assert first.endswith("iter_0000005 was saved by a run with other settings; then -> now:")
    assert changes == [
        "  optimizer.lr: 1e-06 -> 0.0003",
        "  seed: 0 -> 4",
        "  train.num_steps: 100 -> 200",
    ]
    assert last.endswith("checkpoint.allow_changes=[optimizer.lr, seed, train.num_steps]")
    allowed = ["optimizer", "train.num_steps", "seed"]
    run = make_run(tmp_path, **changed, checkpoint__allow_changes=allowed)
    assert find_checkpoint(run).state.step == 5


def test_a_run_without_a_checkpoint_is_known_by_its_config(tmp_path):
    begin(make_run(tmp_path))
    assert find_checkpoint(make_run(tmp_path)) is None
    with pytest.raises(ConfigError, match="seed: 0 -> 1"):
        find_checkpoint(make_run(tmp_path, seed=1))


def test_a_setting_that_came_later_has_its_default_in_an_older_run(tmp_path):
    folder = checkpoint(make_run(tmp_path), 5)
    path = folder / STATE_FILE
    state = json.loads(path.read_text())
    del state["config"]["data"]["shuffle"]
    path.write_text(json.dumps(state))
    assert find_checkpoint(make_run(tmp_path)).folder == folder
    with pytest.raises(ConfigError, match="data.shuffle: True -> False"):
        find_checkpoint(make_run(tmp_path, data__shuffle=False))
