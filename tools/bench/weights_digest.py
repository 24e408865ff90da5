"""How fast the weights digest reads: gigabytes of weights a second, on one core.

    python tools/bench/weights_digest.py [--mib 512] [--repeats 3] [--json]

One line per dtype, of tensors as wide as those of a model; the fastest of the repeats counts, by
the clock. `--json` prints rows of `dtype` and `gb_per_second` instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rl_megatron.checkpoint.digest import tensors_digest  # noqa: E402

WIDTH = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def measure(dtype: str, mebibytes: int, repeats: int) -> float:
    """Gigabytes (10^9 bytes) a second of weights of `dtype` in memory, on this thread."""
    size = DTYPES[dtype].itemsize
    rows = max(1, mebibytes * 2**20 // (size * WIDTH))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, WIDTH, generator=generator).to(DTYPES[dtype])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tensors_digest([("warm.weight", weight[:1])])
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            tensors_digest([("model.weight", weight)])
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return rows * WIDTH * size / min(seconds) / 1e9


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512, help="of weights")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    rows = [
        {"dtype": dtype, "gb_per_second": measure(dtype, options.mib, options.repeats)}
        for dtype in DTYPES
    ]
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"weights digest, {row['dtype']}: {row['gb_per_second']:.2f} GB/s on one core")


if __name__ == "__main__":
    main()
