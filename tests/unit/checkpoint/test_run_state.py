import pytest

from rl_megatron.checkpoint.run_state import STATE_FILE, RunState, read_run_state
from rl_megatron.errors import CheckpointError

STATE = RunState(
    step=8,
    round=2,
    wall_seconds=3.5,
    config={"seed": 1},
    layout={"tensor": 2},
    parts={"data": {"position": 16}, "kl_in_reward": {"kl_coef": 0.1, "ema_kl": None}},
)


def test_what_is_written_is_read(tmp_path):
    STATE.write(tmp_path)
    assert read_run_state(tmp_path) == STATE
    assert STATE.part("data", tmp_path) == {"position": 16}


def test_a_part_that_another_recipe_saved_is_missed_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"no 'prompts', only \['data', 'kl_in_reward'\]"):
        STATE.part("prompts", tmp_path)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "No such file"),
        ("", "cannot be read"),
        ('{"step": 4', "cannot be read"),
        ('{"step": 4}', "format None, and this version reads 1"),
        ('{"format": 9}', "format 9"),
        ("3", "format 3"),
    ],
)
def test_anything_else_is_an_error(text, word, tmp_path):
    if text is not None:
        (tmp_path / STATE_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=word):
        read_run_state(tmp_path)
