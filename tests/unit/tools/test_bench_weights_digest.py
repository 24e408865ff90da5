"""The bench of the digest prints what it says; how fast it is, is for a quiet machine."""

import json

import torch

from tools.bench import weights_digest


def test_a_line_and_a_row_for_each_dtype(capsys):
    threads = torch.get_num_threads()
    weights_digest.main(["--mib", "1", "--repeats", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "weights digest, float32",
        "weights digest, bfloat16",
    ]
    assert all(line.endswith("GB/s on one core") for line in lines)
    weights_digest.main(["--mib", "1", "--repeats", "1", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16"]
    assert all(row["gb_per_second"] > 0 for row in rows)
    assert torch.get_num_threads() == threads
