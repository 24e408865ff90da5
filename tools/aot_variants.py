"""The variants of the Triton kernels that runs use, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from rl_megatron.kernels.launch import Launch, recorded
from rl_megatron.kernels.linear_logprob.triton_rows import TritonRows
from rl_megatron.kernels.policy_loss import PolicyLossSettings, policy_loss
from rl_megatron.kernels.preference_loss import (
    LossType,
    PreferenceLossSettings,
    preference_loss,
)
from tools.aot_compile import specialised

# The widths of two vocabularies: of one every row begins where a wide load may, of one it does not.
WIDTHS = {"": 151936, " odd width": 50257}
GRADIENT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
POLICY_SETTINGS = {
    "vanilla": PolicyLossSettings(),
    "vanilla k3 entropy": PolicyLossSettings(kl_loss_type="k3", entropy_coef=0.01),
    "vanilla k2": PolicyLossSettings(kl_loss_type="k2", clip_ratio_c=None),
    "gspo k3": PolicyLossSettings(loss_mode="gspo", kl_loss_type="k3"),
    "cispo k1": PolicyLossSettings(loss_mode="cispo", kl_loss_type="k1"),
}


def variants() -> dict[str, Launch]:
    """What would be compiled, by a name that says how it differs from its neighbours.

    A binary that several calls share stands under the name of the first.
    """
    found: dict[str, Launch] = {}
    binaries = set()
    backend = make_backend(GPUTarget("cuda", 90, 32))
    for suffix, call in [*row_calls(), *policy_calls(), *preference_calls()]:
        with recorded(run=False) as launches:
            call()
        for launch in launches:
            binary = f"{launch.kernel.__module__} {specialised(launch, backend)}"
            if binary not in binaries:
                binaries.add(binary)
                found[f"{launch.kernel.__name__}{suffix}"] = launch
    return found


def row_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of the row kernels: with and without softcap, widths, types of the gradient."""
    rows = TritonRows()
    one, column = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    for name, width in WIDTHS.items():
        logits = torch.empty(2, width)
        for cap, softcap in ((" softcap", 30.0), ("", None)):
            yield name + cap, lambda x=logits, c=softcap: rows.statistics(x, column, one, c)
            for type_name, dtype in GRADIENT_TYPES.items():
                if name and type_name == "fp16":
                    continue
                yield (
                    f" {type_name}{name}{cap}",
                    lambda x=logits, c=softcap, d=dtype: rows.gradient(
                        x, column, one, c, one, one, one, one, one, d
                    ),
                )


def policy_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of the policy loss: every mode, estimator and optional term at least once."""
    values, bounds = torch.ones(8), torch.tensor([0, 3, 8])
    for name, settings in POLICY_SETTINGS.items():
        reference = values if settings.kl_loss_type else None
        yield (
            f" {name}",
            lambda s=settings, r=reference: policy_loss(
                s, values, values, values, values, values, r, bounds, 0.5
            ),
        )


def preference_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of the preference losses, there and back."""
    values, bounds = torch.ones(8), torch.tensor([0, 3, 8])

    def there_and_back(loss_type: LossType) -> None:
        logprobs = torch.ones(8, requires_grad=True)
        settings = PreferenceLossSettings(loss_type=loss_type)
        preference_loss(settings, logprobs, values, values, bounds, 1.0).loss.backward()

    for loss_type in get_args(LossType):
        yield f" {loss_type}", partial(there_and_back, loss_type)
