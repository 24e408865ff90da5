"""C++ kernels, compiled on this machine when they are first used, and kept for the next run.

The compiler is called directly, on one file without headers of torch: a second or two. What it
makes is for this processor (`-march=native`), so the name it is kept under has the processor in it,
beside the source, the compiler and torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

_LOG = logging.getLogger(__name__)
# No -ffast-math: infinities and NaN must stay what they are.
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wno-psabi"),
)
_COMPILE_SECONDS = 300


class NativeError(Exception):
    """Why there is no compiled library; the reason is for a log line."""


@functools.cache
def compiler() -> str | None:
    """The C++ compiler of this machine: $CXX, or g++; None if there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


@functools.cache
def load(source: Path) -> ctypes.CDLL:
    """The library of `source`, compiled if nobody has done so yet.

    Raises:
        NativeError: It cannot be compiled, kept or loaded.
    """
    try:
        return ctypes.CDLL(str(_compiled(source)))
    except OSError as error:
        raise NativeError(str(error)) from error


def _compiled(source: Path) -> Path:
    """Path of the library; of many processes that ask at once, one compiles it."""
    command = compiler()
    if command is None:
        raise NativeError("no C++ compiler (g++, or what CXX names)")
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{source.stem}-{_key(source, command)}.so"
    if library.exists():
        return library
    with (folder / f"{library.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(command, source, library)
    return library


def _folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "rl_megatron" / "kernels"


def _key(source: Path, command: str) -> str:
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    parts = (source.read_text(), version.stdout, *_FLAGS, torch.__version__, _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """The architecture and what it can do: a home folder may be shared by unlike machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    model = next((line for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()} {model} {features}"


def _compile(command: str, source: Path, library: Path) -> None:
    """Compile to a file of another name and move it into place, so that no half of it is loaded."""
    start = time.monotonic()
    _LOG.info("Compiling %s (once for this machine)", source.name)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        compiled, linked = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
        # Linked without an OpenMP runtime: its functions are found in the one that torch loaded.
        _run([command, *_FLAGS, "-c", str(source), "-o", str(compiled)])
        _run([command, "-shared", str(compiled), "-o", str(linked)])
        linked.replace(library)
    _LOG.info("Compiled %s in %.1f s: %s", source.name, time.monotonic() - start, library)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMPILE_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise NativeError(f"{command[0]} took more than {_COMPILE_SECONDS} s") from error
    if done.returncode:
        raise NativeError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
