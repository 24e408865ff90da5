"""Compiling C++ kernels on first use: once for many processes, and a reason where it fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from rl_megatron.kernels import native

TWICE = 'extern "C" int twice(int x) { return 2 * x; }\n'
LOAD = """
import logging, sys
from pathlib import Path
logging.basicConfig(level=logging.INFO)
from rl_megatron.kernels import native
print(native.load(Path(sys.argv[1])).twice(21))
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of this test's own; what other tests have loaded stays loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(folder: Path, text: str) -> Path:
    source = folder / "twice.cpp"
    source.write_text(text)
    return source


def test_many_processes_at_once_compile_it_once(cache, tmp_path):
    source = write(tmp_path, TWICE)
    command = [sys.executable, "-c", LOAD, str(source)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in started]
    assert [out for out, _ in outputs] == ["42\n"] * 2
    assert sum("Compiling twice.cpp" in log for _, log in outputs) == 1
    assert len(list(cache.rglob("*.so"))) == 1
    # Nothing is left behind of the way there.
    assert {path.suffix for path in cache.rglob("*") if path.is_file()} == {".so", ".lock"}


def test_another_source_is_another_library(cache, tmp_path):
    assert native.load(write(tmp_path, TWICE)).twice(4) == 8
    other = tmp_path / "other"
    other.mkdir()
    assert native.load(write(other, TWICE.replace("2 *", "3 *"))).twice(4) == 12


def test_an_error_of_the_compiler_is_the_reason(cache, tmp_path):
    with pytest.raises(native.NativeError, match="twice.cpp"):
        native.load(write(tmp_path, "int twice(int x) { return y; }"))
    assert not list(cache.rglob("*.so"))


def test_no_compiler_is_a_reason(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "compiler", lambda: None)
    with pytest.raises(native.NativeError, match="no C.. compiler"):
        native.load(write(tmp_path, TWICE))


def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path, monkeypatch):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    with pytest.raises(native.NativeError, match="file"):
        native.load(write(tmp_path, TWICE))


OPENMP_RUNTIMES = """
from pathlib import Path
from rl_megatron.kernels.linear_logprob.cpu_rows import CpuRows
CpuRows()
loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
print(sum("omp" in Path(path).name and ".so" in path for path in loaded))
"""


def test_the_compiled_kernels_bring_no_second_openmp():
    if not Path("/proc/self/maps").exists():
        pytest.skip("this system does not say which libraries are loaded")
    # In a process of its own: other libraries may bring theirs.
    command = [sys.executable, "-c", OPENMP_RUNTIMES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
