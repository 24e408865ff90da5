"""The parameters of a model without the model: for tests of what is loaded where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from rl_megatron.interfaces.weights import WeightRule


class BareChunk(nn.Module):
    """One pipeline chunk as Megatron names it: layers by local index, each knowing its number."""

    def __init__(self, rules: Sequence[WeightRule], layers: Iterable[int]) -> None:
        """Layers `layers` (counted over the model from 0), and all weights outside of layers."""
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(nn.Module() for _ in layers)
        local = dict(zip(layers, self.decoder.layers, strict=True))
        for number, layer in local.items():
            layer.layer_number = number + 1
        for rule in rules:
            if rule.is_copy:
                continue
            shard = rule.split.shard(
                lambda i, s, r=rule: torch.zeros(r.split.hf_shapes[i])[s], 0, 1
            )
            path = rule.megatron_name.split(".")
            if path[:2] != ["decoder", "layers"]:
                _put(self, path, shard)
            elif int(path[2]) in local:
                _put(local[int(path[2])], path[3:], shard)


def _put(module: nn.Module, path: Sequence[str], value: torch.Tensor) -> None:
    *above, name = path
    for part in above:
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    module.register_parameter(name, nn.Parameter(value))
