"""Every stage is shown once, with what a reader needs to check alignment."""

import logging
from dataclasses import dataclass

import torch

from rl_megatron.metrics.trace import start_trace, trace


@dataclass
class Pair:
    tokens: torch.Tensor
    name: str
    count: int


def shown(caplog):
    return [record.getMessage() for record in caplog.records if record.name.endswith("trace")]


def test_a_stage_is_shown_once_with_shapes_and_dtypes(caplog):
    caplog.set_level(logging.INFO)
    start_trace(rank=0)
    for size in (3, 4):
        pair = Pair(torch.zeros(size, dtype=torch.int64), "text", 7)
        trace("pack", "whole", pair=pair, sums={"loss": torch.ones(2, 5)}, pairs=[pair])
    (message,) = shown(caplog)
    lines = [line.split() for line in message.splitlines()]
    assert lines[0] == ["trace", "pack", "(whole)"]
    assert ["pair.tokens", "[3]", "int64", "cpu"] in lines
    assert ["pair.count", "[]", "int", "7"] in lines
    assert ["sums[loss]", "[2,", "5]", "float32", "cpu"] in lines
    assert ["pairs", "[1]", "list", "of", "Pair"] in lines
    assert ["pairs[0].tokens", "[3]", "int64", "cpu"] in lines


def test_nothing_is_shown_on_other_ranks_or_before_the_start(caplog):
    caplog.set_level(logging.INFO)
    start_trace(rank=1)
    trace("pack", "whole", tokens=torch.zeros(3))
    assert shown(caplog) == []
