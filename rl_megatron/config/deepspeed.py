"""DeepSpeed's ZeRO: what of the training state the ranks share, and where it waits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rl_megatron.config.base import Idle, Problem, Strict

_AUTO = "auto"

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
    """Folder on a fast local disk, for what is offloaded to nvme; models, ranks and jobs may share
    it. DeepSpeed compiles its reader on first use, which takes minutes: a C++ compiler and libaio's
    headers must be there."""

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


def engine_settings(
    config: DeepSpeedConfig, dtype: str, clip_grad: float, world_size: int
) -> dict[str, Any]:
    """What `deepspeed.initialize` takes: what the run decides, and a user's own settings beside it.

    Gradients are added up and reduced in float32 whatever the model's dtype is. DeepSpeed counts
    micro-batches of its own only to know when to reduce, which the backend tells it.

    Args:
        config: The run's; it has no `json_problems`.
        dtype: Of the model, as in `model.dtype`.
        clip_grad: As `optimizer.clip_grad`.
        world_size: Ranks.
    """
    theirs = {} if config.config_path is None else _read(Path(config.config_path))
    theirs = {name: value for name, value in theirs.items() if name not in _FOREIGN}
    ours = _decided(config, dtype, clip_grad)
    return _merged(_merged(_DEFAULTS, theirs), ours | {"train_batch_size": world_size})


def json_problems(config: DeepSpeedConfig, dtype: str, clip_grad: float) -> Iterator[Problem]:
    """What of `config_path` contradicts the run; arguments as of `engine_settings`."""
    path = config.config_path
    if path is None:
        return
    try:
        theirs = _read(Path(path))
    except (OSError, ValueError) as error:
        text = f"cannot be read ({error}); name a JSON file of DeepSpeed's settings"
        yield Problem("config_path", path, text)
        return
    ours = _decided(config, dtype, clip_grad)
    for text in (*_contradictions(theirs, ours, ""), *_foreign(theirs)):
        yield Problem("config_path", path, text)


_DEFAULTS = {
    "zero_optimization": {
        "reduce_bucket_size": 50_000_000,
        "allgather_bucket_size": 50_000_000,
        "stage3_prefetch_bucket_size": 50_000_000,
    }
}


def _decided(config: DeepSpeedConfig, dtype: str, clip_grad: float) -> dict[str, Any]:
    """What the run decides, nested as in DeepSpeed's JSON."""
    zero: dict[str, Any] = {"stage": config.zero_stage}
    for name in ("offload_optimizer", "offload_param"):
        zero[name] = {"device": getattr(config, name)}
        if config.nvme_path is not None:
            zero[name]["nvme_path"] = config.nvme_path
    return {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip_grad,
        # A gradient that is not finite is then found in bfloat16 too.
        "bf16": {"enabled": dtype == "bfloat16", "check_grad_overflow": True},
        "fp16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


def _read(path: Path) -> dict[str, Any]:
    settings = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise ValueError("it holds no JSON object")
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
            yield f'its {key} = {value!r}: {remedy}, and remove this key or make it "auto"'


# The run's own numbers for these are made up: it counts tokens, and every rank its own steps.
_BATCH_SIZES = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}


_FOREIGN = ("optimizer", "scheduler")


def _foreign(theirs: Mapping[str, Any]) -> Iterator[str]:
    """Sections that the run has in its own words."""
    for name in _FOREIGN:
        section = theirs.get(name, {})
        parameters = section.get("params", {}) if isinstance(section, Mapping) else {name: section}
        if any(value != _AUTO for value in parameters.values()):
            yield f"its {name} = {theirs[name]!r}: set optimizer of the run, and remove this key"


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
