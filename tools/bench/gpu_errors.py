"""Errors of the kernels against float64, on the device that they run on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.objective import ModelOutput, Objective
from rl_megatron.kernels.linear_logprob import linear_logprob
from rl_megatron.kernels.linear_logprob.torch_rows import TorchRows
from rl_megatron.kernels.linear_logprob.triton_rows import TritonRows
from rl_megatron.kernels.policy_loss import PolicyLossSettings, policy_loss
from rl_megatron.kernels.preference_loss import PreferenceLossSettings, preference_loss
from rl_megatron.losses import dpo_objective, grpo_objective, totals


@dataclass(frozen=True)
class Finding:
    """One number, and the most that it may be, if there is such a bound."""

    name: str
    value: float
    unit: str
    bound: float | None = None

    @property
    def is_wrong(self) -> bool:
        """Whether it is beyond its bound; what is no number is."""
        return self.bound is not None and not self.value <= self.bound


def row_errors(device: torch.device) -> Iterator[Finding]:
    """The row kernels on tiles of several widths, with -inf among the logits."""
    for width in (515, 8192, 50257):
        for softcap in (None, 30.0):
            label = f"{width} columns" + (", softcap" if softcap else "")
            yield from tile_errors(device, width, softcap, label)


def tile_errors(
    device: torch.device, width: int, softcap: float | None, label: str
) -> Iterator[Finding]:
    """One tile, by Triton in float32 and by plain torch in float64."""
    generator = torch.Generator().manual_seed(width)
    num_rows = 16
    logits = 4 * torch.randn(num_rows, width, generator=generator)
    if softcap is None:
        logits[:, ::7] = -math.inf
    column = torch.randint(width, (num_rows,), generator=generator) // 7 * 7 + 1
    column = column.clamp(max=width - 1)
    column[0] = -1
    numbers = 0.5 + torch.rand(3, num_rows, generator=generator)
    logits, column, numbers = (x.to(device) for x in (logits, column, numbers))
    inv_temperature, *g = numbers.unbind()
    exact = TorchRows().statistics(logits.double(), column, inv_temperature.double(), softcap)
    got = TritonRows().statistics(logits, column, inv_temperature, softcap).double()
    (logprob, entropy), (want_logprob, want_entropy) = finished(got), finished(exact)
    yield Finding(f"log-prob, {label}", far(logprob, want_logprob), "absolute", 3e-6)
    yield Finding(f"entropy, {label}", far(entropy, want_entropy), "absolute", 5e-6)
    known = (exact[0], exact[1].log(), want_entropy, *(x.double() for x in g))
    want = TorchRows().gradient(
        logits.double(), column, inv_temperature.double(), softcap, *known, torch.float64
    )
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 4e-3)):
        result = TritonRows().gradient(
            logits.clone(), column, inv_temperature, softcap, *(x.float() for x in known), dtype
        )
        error = float((result.double() - want).norm() / want.norm())
        yield Finding(f"gradient in {str(dtype)[6:]}, {label}", error, "relative", bound)


def finished(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of a whole row."""
    m, s, u, z_y = statistics
    return z_y - m - s.log(), s.log() - u / s


def far(got: Tensor, want: Tensor) -> float:
    """The largest difference."""
    return float((got.double() - want.double()).abs().max())


def head_errors(device: torch.device) -> Iterator[Finding]:
    """The whole head against all logits in float64, gradients of both outputs."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(24, 64, generator=generator)
    weight = 0.3 * torch.randn(1200, 64, generator=generator)
    targets = torch.randint(1100, (24,), generator=generator).to(device)
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 6e-3)):
        got = head(hidden.to(device, dtype), weight.to(device, dtype), targets, "triton")
        exact = [x.to(device, dtype).double() for x in (hidden, weight)]
        want = head(exact[0], exact[1], targets, "reference")
        label = f"head in {str(dtype)[6:]}"
        for name, x, y in zip(("log-prob", "entropy"), got[:2], want[:2], strict=True):
            yield Finding(f"{name}, {label}", far(x, y), "absolute", 5e-6)
        for name, x, y in zip(("hidden", "weight"), got[2:], want[2:], strict=True):
            error = float((x.double() - y).norm() / y.norm())
            yield Finding(f"gradient of {name}, {label}", error, "relative", bound)


def head(
    hidden: Tensor, weight: Tensor, targets: Tensor, implementation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-prob, entropy, and the gradients of hidden states and weight."""
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    logprob, entropy = linear_logprob(
        hidden, weight, targets, 0.7, 1100, implementation=implementation
    )
    (logprob.sum() + 0.5 * entropy.sum()).backward()
    assert hidden.grad is not None and weight.grad is not None
    return logprob.detach(), entropy.detach(), hidden.grad, weight.grad


def make_batch(device: torch.device) -> PackedBatch:
    """Pairs of ragged sequences with log-ratios that are clipped on both sides."""
    torch.manual_seed(0)
    lengths = torch.tensor([600, 3, 1, 530, 40, 41, 300, 7])
    num_tokens = int(lengths.sum())
    old, ref = (-2 * torch.rand(2, num_tokens)).unbind()
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    mask = torch.rand(num_tokens) < 0.8
    mask[bounds[:-1]] = False
    batch = PackedBatch(
        tokens=torch.zeros(num_tokens, dtype=torch.int64),
        cu_seqlens=bounds,
        response_mask=mask,
        sequence_ids=torch.arange(len(lengths)),
        paired=True,
        advantages=torch.randn(num_tokens).masked_fill(~mask, math.nan),
        old_logprobs=old,
        ref_logprobs=ref,
    )
    return batch.to(device)


def loss_errors(device: torch.device) -> Iterator[Finding]:
    """The losses and their gradients against their definitions in plain torch."""
    batch = make_batch(device)
    for loss_mode in ("vanilla", "gspo", "cispo"):
        settings = PolicyLossSettings(loss_mode, kl_loss_type="k3", kl_loss_coef=0.1)
        objective = grpo_objective(
            max_response_tokens=2000, loss_mode=loss_mode, use_kl_loss=True, kl_loss_coef=0.1
        )
        yield from loss_findings(f"grpo {loss_mode}", objective, settings, batch)
    for loss_type in ("sigmoid", "ipo", "orpo"):
        settings = PreferenceLossSettings(loss_type=loss_type, rpo_alpha=0.5)
        objective = dpo_objective(loss_type=loss_type, rpo_alpha=0.5)
        yield from loss_findings(f"dpo {loss_type}", objective, settings, batch)


def loss_findings(
    name: str,
    objective: Objective,
    settings: PolicyLossSettings | PreferenceLossSettings,
    batch: PackedBatch,
) -> Iterator[Finding]:
    """Loss, worst metric and gradient of one loss."""
    batch, counts = objective.weigh(batch), totals(batch)
    torch.manual_seed(1)
    logprobs = -2 * torch.rand(batch.num_tokens).to(batch.tokens.device)
    leaves = [logprobs.clone().requires_grad_() for _ in range(2)]
    entropy = torch.zeros_like(logprobs)
    want = objective.loss(ModelOutput(leaves[0], entropy), batch, counts)
    weights = batch.loss_weights
    assert weights is not None
    if isinstance(settings, PolicyLossSettings):
        assert batch.old_logprobs is not None and batch.advantages is not None
        got = policy_loss(
            settings, leaves[1], entropy, batch.old_logprobs, batch.advantages, weights,
            batch.ref_logprobs, batch.cu_seqlens, 1 / counts.num_tokens,
        )  # fmt: skip
    else:
        got = preference_loss(
            settings, leaves[1], batch.ref_logprobs, weights, batch.cu_seqlens,
            1 / counts.num_pairs,
        )  # fmt: skip
    want.loss.backward()
    got.loss.backward()
    gradients = [leaf.grad for leaf in leaves]
    assert gradients[0] is not None and gradients[1] is not None
    yield Finding(f"loss, {name}", far(got.loss, want.loss), "absolute", 1e-11)
    assert got.metrics.keys() == want.metrics.keys()
    worst = max(far(got.metrics[key], value) for key, value in want.metrics.items())
    yield Finding(f"worst metric, {name}", worst, "absolute", 1e-9)
    error = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    yield Finding(f"gradient, {name}", error, "relative", 1e-6)
