import pytest

from rl_megatron.errors import ConfigError
from rl_megatron.rewards.python_function import load_function


def test_a_function_from_a_file(tmp_path):
    file = tmp_path / "math.py"
    file.write_text("def short(prompt, response, answer):\n    return -float(len(response))\n")
    assert load_function(f"{file}:short")("q", "abc", None) == -3.0
    import math

    assert math.pi  # the file has not taken the place of the module of its name


def test_a_function_from_a_module():
    assert load_function("operator:concat")("a", "b") == "ab"


def test_what_is_missing_is_named(tmp_path):
    file = tmp_path / "mine.py"
    with pytest.raises(ConfigError, match="there is no file .*mine.py"):
        load_function(f"{file}:short")
    file.write_text("def long(prompt, response, answer): return 0\nlimit = 3\n")
    with pytest.raises(ConfigError, match=r"mine.py:short' names no function; .* has long$"):
        load_function(f"{file}:short")
    with pytest.raises(ConfigError, match="names no function"):
        load_function(f"{file}:limit")
    with pytest.raises(ConfigError, match="No module named 'no_such_package'; install"):
        load_function("no_such_package.rewards:f")
