"""The verbs: what a recipe asks of a backend, an engine, a weight sync and a reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.objective import Objective
from rl_megatron.interfaces.records import Prompt, Rollout, Sampling


class Scorer(Protocol):
    """A frozen model, such as the reference. Every method is called by all ranks together."""

    def logprobs(self, batch: PackedBatch) -> Float[Tensor, " T"]:
        """Log-prob of every response token of the whole batch, fp32, on the host, on all ranks.

        All other tokens get 0, and nothing is computed for them by the head. The run's temperature
        is applied.
        """
        ...

    def close(self) -> None:
        """Release what the model holds."""
        ...


@runtime_checkable
class PendingSave(Protocol):
    """A save that has begun."""

    def is_done(self) -> bool:
        """Whether this rank has nothing more to write; not collective."""
        ...

    def finish(self) -> None:
        """Wait until all ranks have written all, and make it readable. Called by all together.

        Raises CheckpointError where a rank could not write.
        """
        ...


class Stateful(Protocol):
    """A part of a run that moves on with it, and goes on from where it was after a stop."""

    def state_dict(self) -> dict[str, Any]:
        """What it needs to go on; plain JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo `state_dict`."""
        ...


class RewardScorer(Protocol):
    """A frozen reward model. Every method is called by all ranks together."""

    def scores(self, batch: PackedBatch) -> Float[Tensor, " N"]:
        """The reward of every sequence of the whole batch, fp32, on the host, on all ranks.

        It is read at the last token of the sequence, which its length says, whatever token that is.
        """
        ...

    def close(self) -> None:
        """Release what the model holds."""
        ...


class TrainedModel(Protocol):
    """How a model is held and stepped. Every method is called by all ranks together."""

    def train_step(self, batch: PackedBatch, objective: Objective, lr: float) -> dict[str, float]:
        """One optimiser step on the mini-batch; the loss and metrics of the whole mini-batch.

        `batch` is the whole mini-batch, equal on all ranks. Where no token of it counts, no update
        is made and `optimizer/skipped` is 1. Raises NumericsError, without touching the weights,
        if the loss or the gradient norm is not finite.
        """
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, whole, on every rank; one at a time."""
        ...

    def save(self, folder: Path, *, background: bool = False) -> PendingSave:
        """Write weights and optimizer state, as they are now, into `folder`, which is empty.

        `background`: return while it is still being written, where the backend can.
        """
        ...

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, under this or any other layout."""
        ...

    def offload(self) -> None:
        """Move weights and optimizer state to host memory; on a CPU there is nothing to move."""
        ...

    def onload(self) -> None:
        """Undo `offload`."""
        ...

    def close(self) -> None:
        """Release what the backend holds."""
        ...


class PolicyBackend(TrainedModel, Scorer, Protocol):
    """A policy: it can be stepped, and has log-probs."""


class RewardBackend(TrainedModel, RewardScorer, Protocol):
    """A reward model: it can be stepped, and has scores."""


class RolloutEngine(Protocol):
    """How text is sampled. Every method is called by all ranks together."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, group_size: int, seed: int
    ) -> list[Rollout]:
        """`group_size` rollouts of each prompt, equal on all ranks, ordered by prompt, then sample.

        A rollout depends on (weights, prompt, sampling, seed, sample index) only: not on its
        neighbours, the layout or the number of ranks.
        """
        ...

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], policy_version: int) -> None:
        """Take new weights under their Hugging Face names and forget everything cached.

        An engine on the trainer's own weights does not ask for them.
        """
        ...

    def sleep(self) -> None:
        """Give back memory (KV cache, and weights where they are the engine's own)."""
        ...

    def wake(self) -> None:
        """Take memory again, before `load_weights`. An engine of its own weights begins asleep."""
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...


class WeightSync(Protocol):
    """How the trainer's weights reach the engine."""

    def sampling(self, policy_version: int = 0) -> AbstractContextManager[RolloutEngine]:
        """The engine, awake with the trainer's current weights; afterwards it sleeps.

        Called by all ranks together, while nothing is trained. `policy_version` is noted in the
        rollouts.
        """
        ...


class RewardFn(Protocol):
    """One scalar for one response, from text alone."""

    def __call__(self, prompt: str, response: str, answer: str | None) -> float | None:
        """The reward, or None where the response cannot be scored (it is then not trained on)."""
        ...
