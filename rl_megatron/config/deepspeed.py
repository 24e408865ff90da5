"""DeepSpeed's ZeRO: what of the training state the ranks share, and where it waits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rl_megatron.config.base import Idle, Problem, Strict
from rl_megatron.errors import ConfigError

_AUTO = "auto"
_SETTING = "deepspeed.config_path"

Place = Literal["none", "cpu", "nvme"]


class DeepSpeedConfig(Strict):
    """ZeRO of backend deepspeed (Rajbhandari et al. 2020). Changes no number beyond rounding."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """What is shared over the ranks. 1: the optimizer's state. 2: gradients too. 3: weights too.
    0: nothing."""

    offload_optimizer: Place = "none"
    """Where the optimizer's state waits and is updated, if not on the device."""

    offload_param: Place = "none"
    """Where weights wait, if not on the device; with `zero_stage` 3."""

    nvme_path: str | None = None
    """Folder on a fast local disk, for what is offloaded to nvme."""

    config_path: str | None = None
    """A JSON file of DeepSpeed's own settings, for whatever has no setting here. One that speaks of
    what the run decides (batch sizes, dtype, clipping, optimizer, ...) must agree or say "auto"."""

    def problems(self) -> Iterable[Problem]:
        """Offload that the stage does not have, or that has no place."""
        if self.offload_optimizer != "none" and self.zero_stage == 0:
            yield Problem(
                "offload_optimizer",
                self.offload_optimizer,
                "ZeRO offloads what it shares, and stage 0 shares nothing; raise "
                "deepspeed.zero_stage or remove this key",
                others=("zero_stage",),
            )
        for name in ("offload_optimizer", "offload_param"):
            place = getattr(self, name)
            if place != "none" and self.zero_stage != 3 and (name, place) not in _BELOW_STAGE_3:
                yield Problem(
                    name,
                    place,
                    "needs ZeRO stage 3; set deepspeed.zero_stage=3 or remove this key",
                    others=("zero_stage",),
                )
        if self.uses_nvme and self.nvme_path is None:
            yield Problem(
                "nvme_path",
                None,
                "something is offloaded to nvme; name a folder on a fast local disk",
                others=("offload_optimizer", "offload_param"),
            )

    def idle(self) -> Mapping[str, Idle]:
        """A folder that nothing is put into."""
        if self.uses_nvme:
            return {}
        reason = "nothing is offloaded to nvme; remove this key"
        return {"nvme_path": Idle(reason, ("offload_optimizer", "offload_param"))}

    @property
    def uses_nvme(self) -> bool:
        """Whether something is offloaded to a disk."""
        return "nvme" in (self.offload_optimizer, self.offload_param)


_BELOW_STAGE_3 = {("offload_optimizer", "cpu")}


def merge_settings(
    path: str | None, ours: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """DeepSpeed's settings for a run: what the run decides, and a user's own beside it.

    Args:
        path: The user's JSON file; None without one.
        ours: What the run decides, nested as in DeepSpeed's JSON.
        defaults: What holds where the file says nothing.

    Raises:
        ConfigError: The file cannot be read, or contradicts the run; every such setting is named.
    """
    theirs = {} if path is None else _read(Path(path))
    mistakes = [*_contradictions(theirs, ours, ""), *_foreign(theirs)]
    if mistakes:
        raise ConfigError(f"{_SETTING} {path} contradicts the run:\n" + "\n".join(mistakes))
    theirs = {name: value for name, value in theirs.items() if name not in _FOREIGN}
    return _merged(_merged(defaults, theirs), ours)


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{_SETTING} {path} cannot be read ({error}); name a JSON file, or remove this key"
        ) from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{_SETTING} {path} must hold a JSON object of DeepSpeed's settings")
    return settings


# Where the run says what DeepSpeed's key says.
_DECIDED_BY = {
    "train_batch_size": "train.global_batch_size or train.mini_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.micro_batch_size",
    "gradient_clipping": "optimizer.clip_grad",
    "bf16.enabled": "model.dtype",
    "fp16.enabled": "model.dtype",
    "zero_optimization.stage": "deepspeed.zero_stage",
    "zero_optimization.offload_optimizer.device": "deepspeed.offload_optimizer",
    "zero_optimization.offload_param.device": "deepspeed.offload_param",
}


def _contradictions(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str
) -> Iterator[str]:
    for name, value in theirs.items():
        key = prefix + name
        if value == _AUTO or name not in ours:
            continue
        if isinstance(value, Mapping) and isinstance(ours[name], Mapping):
            yield from _contradictions(value, ours[name], f"{key}.")
        elif value != ours[name] or key in _BATCH_SIZES:
            where = _DECIDED_BY.get(key)
            remedy = f"set {where} of the run" if where else "the run needs its own value"
            yield f'  {key} = {value!r}: {remedy}, and remove this key or make it "auto"'


# The run's own numbers for these are made up: it counts tokens, and every rank its own steps.
_BATCH_SIZES = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}


_FOREIGN = ("optimizer", "scheduler")


def _foreign(theirs: Mapping[str, Any]) -> Iterator[str]:
    """Sections that the run has in its own words."""
    for name in _FOREIGN:
        parameters = (theirs.get(name) or {}).get("params", {})
        if any(value != _AUTO for value in parameters.values()):
            yield f"  {name} = {theirs[name]!r}: set optimizer of the run, and remove this key"


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, and of a key in both the value above; "auto" is no value."""
    merged = dict(below)
    for name, value in above.items():
        mine = merged.get(name)
        if isinstance(value, Mapping):
            merged[name] = _merged(mine if isinstance(mine, Mapping) else {}, value)
        elif value != _AUTO:
            merged[name] = value
    return merged
