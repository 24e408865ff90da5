"""What a recipe answers on its command line."""

import subprocess
import sys

import pytest

from rl_megatron.config import GRPORun, SFTRun, load_run, parse_command_line

SFT_YAML = """\
name: a-run
model: {path: models/tiny}
data: {train: {path: rows.jsonl}}
train: {num_steps: 100}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(SFT_YAML)
    return str(path)


def test_a_run_comes_back(config):
    run = parse_command_line(SFTRun, "Trains.", [config, "seed=3", "optimizer.lr=1e-4"])
    assert (run.seed, run.optimizer.lr) == (3, 1e-4)


def test_print_config_prints_what_loads_again(config, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        parse_command_line(SFTRun, "Trains.", ["--print-config", config, "seed=3"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(printed)
    assert load_run(SFTRun, tmp_path / "again.yaml") == load_run(SFTRun, config, ["seed=3"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{}", "sed=3"], "  sed = 3 (command line): unknown key; did you mean 'seed'?"),
        ([], "no file given: name one CONFIG.yaml; --help says more"),
        (["{}", "b.yaml"], "b.yaml) given: name one CONFIG.yaml"),
        (
            ["{}", "--seed=3"],
            "unknown option --seed=3: there are --print-config, --trace-shapes and --help",
        ),
        (["none.yaml"], "none.yaml: no such file"),
    ],
)
def test_mistakes_go_to_stderr_and_exit_2(config, capsys, arguments, text):
    with pytest.raises(SystemExit) as stop:
        parse_command_line(SFTRun, "Trains.", [a.replace("{}", config) for a in arguments])
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert text in output.err
    assert "Traceback" not in output.err
    assert output.out == ""


def test_one_rank_speaks(config, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as stop:
        parse_command_line(SFTRun, "Trains.", [config, "sed=3"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == ""


def test_help_exits_0_without_a_file(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_command_line(GRPORun, "Trains with rewards.", ["--help"])
    assert stop.value.code == 0
    assert "Trains with rewards." in capsys.readouterr().out


def test_print_config_needs_neither_torch_nor_half_a_second(config):
    program = (
        "import sys, time; start = time.process_time()\n"
        "from rl_megatron.config import SFTRun, parse_command_line\n"
        "try: parse_command_line(SFTRun, 'Trains.', sys.argv[1:])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "heavy = {'torch', 'transformers', 'megatron', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.stderr.write(str(time.process_time() - start))\n"
    )
    command = [sys.executable, "-c", program, config, "--print-config"]
    for _ in range(5):  # CPU time, and the best of a few: the cores may be busy with other tests
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        assert answer.stdout.startswith("name: a-run\n")
        if (seconds := float(answer.stderr)) < 0.5:
            return
    raise AssertionError(f"--print-config took {seconds} s of CPU time")
