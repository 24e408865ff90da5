"""The ways to log-probs that `linear_logprob.py` measures: ours, torch's and other libraries'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_megatron.kernels.linear_logprob import linear_logprob

# Matrix products that each mode is measured against.
MODES = {"forward": 1, "two-pass": 4, "one-pass": 4}
Values = tuple[Tensor, Tensor | None]


@dataclass
class Problem:
    """Hidden states [T, H], head [V, H], targets [T], gradients of log-prob and entropy [2, T]."""

    hidden: Tensor
    head: Tensor
    targets: Tensor
    gradients: Tensor | None

    def drop_gradients(self) -> None:
        """Forget what was computed."""
        self.hidden.grad = self.head.grad = None


@dataclass(frozen=True)
class Way:
    """A way to log-prob and, if it can, entropy.

    `modes` it has, `devices` it runs on, `package` it needs. `own_dtype`: it multiplies in the
    dtype of its inputs, also where a CPU is slow at that. `whole`: with all tokens, whatever time
    that takes.
    """

    values: Callable[[Problem], Values]
    modes: tuple[str, ...] = ("forward", "two-pass")
    devices: tuple[str, ...] = ("cpu", "cuda")
    package: str | None = None
    one_pass: Callable[[Problem], Values] | None = None
    own_dtype: bool = True
    whole: bool = False

    def make(self, problem: Problem, mode: str) -> Callable[[], object]:
        """One pass of `mode`."""

        def forward() -> Values:
            with torch.no_grad():
                return self.values(problem)

        def backward() -> None:
            compute = self.one_pass if mode == "one-pass" else self.values
            assert compute is not None and problem.gradients is not None
            values = [v for v in compute(problem) if v is not None]
            gradients = [g.to(v.dtype) for v, g in zip(values, problem.gradients, strict=False)]
            torch.autograd.backward(values, gradients)

        return forward if mode == "forward" else backward

    @staticmethod
    def kept_bytes(problem: Problem, mode: str) -> int:
        """Bytes of the gradients that a pass leaves behind."""
        if mode == "forward":
            return 0
        return sum(x.numel() * x.element_size() for x in (problem.hidden, problem.head))


def ours(implementation: str, devices: tuple[str, ...]) -> Way:
    """The fused head with one implementation of its row kernels."""

    def values(problem: Problem, **kwargs: object) -> Values:
        return linear_logprob(
            problem.hidden, problem.head, problem.targets, 1.0, len(problem.head),
            implementation=implementation, **kwargs,
        )  # fmt: skip

    def one_pass(problem: Problem) -> Values:
        g = problem.gradients
        assert g is not None
        return values(problem, token_gradient=lambda rows, *_: (g[0][rows], g[1][rows]))

    modes = ("forward", "two-pass", "one-pass")
    whole = implementation != "torch"
    return Way(values, modes, devices, one_pass=one_pass, own_dtype=False, whole=whole)


def plain(problem: Problem) -> Values:
    """By way of all logits."""
    return _plain(problem.hidden, problem.head, problem.targets)


def _plain(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = (hidden @ head.t()).float().log_softmax(dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy


def compiled(problem: Problem) -> Values:
    """The same by torch.compile."""
    return torch.compile(_plain)(problem.hidden, problem.head, problem.targets)


def torch_cross_entropy(problem: Problem) -> Values:
    """torch's own chunked one."""
    options = torch.nn.LinearCrossEntropyOptions()
    loss = F.linear_cross_entropy(
        problem.hidden, problem.head, problem.targets, reduction="none", options=options
    )
    return -loss, None


def liger(problem: Problem) -> Values:
    """Liger's log-probs of chunks of the vocabulary, which run without a GPU."""
    from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction

    logprob = _ChunkedSelectiveLogProbFunction.apply(
        problem.hidden, problem.head, problem.targets, None, 1.0, 4096
    )
    return logprob, None


def cut_cross_entropy(implementation: str) -> Callable[[Problem], Values]:
    """Apple's, by its kernels or by torch.compile."""

    def values(problem: Problem) -> Values:
        from cut_cross_entropy import linear_cross_entropy

        loss = linear_cross_entropy(
            problem.hidden, problem.head, problem.targets, reduction="none", impl=implementation
        )
        return -loss, None

    return values


WAYS = {
    "ours: cpu": ours("cpu", ("cpu",)),
    "ours: triton": ours("triton", ("cuda",)),
    "ours: torch": ours("torch", ("cpu", "cuda")),
    "plain torch": Way(plain),
    "torch.compile": Way(compiled),
    "Liger, selective": Way(liger, package="liger_kernel"),
    "CCE, torch.compile": Way(
        cut_cross_entropy("torch_compile"), devices=("cpu",), package="cut_cross_entropy"
    ),
    "CCE": Way(cut_cross_entropy("cce"), devices=("cuda",), package="cut_cross_entropy"),
}
if hasattr(F, "linear_cross_entropy"):
    WAYS["torch linear_cross_entropy"] = Way(torch_cross_entropy)
