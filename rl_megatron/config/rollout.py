"""How responses are sampled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic import Strict as StrictMode

from rl_megatron.config.base import Problem, Strict


class DynamicSamplingConfig(Strict):
    """Groups whose rewards are all equal are replaced by groups of further prompts (DAPO)."""

    max_refills: PositiveInt = 20
    """How often further prompts are drawn for one rollout batch. A batch that is not full then
    stops the run."""

    reward: str | None = None
    """The reward of this name decides whether a group differs; null: the sum of all. DAPO asks the
    right answer only, so that length does not keep a group that is right throughout."""


class RolloutConfig(Strict):
    """One rollout batch: `prompts_per_batch` prompts with `group_size` responses each."""

    engine: Literal["megatron", "hf"] | None = None
    """megatron: on the weights of backend megatron. hf: on those of backend torch. null: that of
    the backend."""

    prompts_per_batch: PositiveInt = 32
    """Prompts of a rollout batch."""

    group_size: PositiveInt = 8
    """Responses to each prompt (verl's `rollout.n`)."""

    temperature: float = 1.0
    """Logits are divided by it, in sampling and in all log-probs of training alike."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass kept; 1.0: all."""

    top_k: NonNegativeInt = 0
    """Tokens kept; 0: all."""

    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Tokens below min_p times the highest probability are dropped; 0.0: none."""

    max_response_tokens: PositiveInt = 256
    """A response is cut after this many tokens."""

    min_response_tokens: NonNegativeInt = 0
    """A response cannot stop before this many tokens."""

    stop_token_ids: Annotated[tuple[NonNegativeInt, ...], StrictMode(False)] = ()
    """Tokens that end a response, beside the tokenizer's own end of sequence."""

    dynamic_sampling: DynamicSamplingConfig | None = None
    """Train on groups whose rewards differ only, `prompts_per_batch` of them; null: on all."""

    max_concurrent_sequences: PositiveInt = 256
    """Responses sampled side by side: bounds the memory of the KV cache, changes no number."""

    def problems(self) -> Iterable[Problem]:
        """Sampling that cannot be trained on, and bounds that cross."""
        if self.temperature <= 0:
            yield Problem(
                "temperature",
                self.temperature,
                "training samples, so it must be above 0 (greedy is for evaluation); take 1.0",
            )
        for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            value = getattr(self, name)
            if value != off:
                yield Problem(
                    name,
                    value,
                    "leaves out tokens that the trained distribution contains, so the ratio of new "
                    f"to old log-probs would be wrong; remove this key (off is {off})",
                )
        if self.dynamic_sampling is not None and self.group_size == 1:
            yield Problem(
                "group_size",
                1,
                "rewards of a group of one never differ, so rollout.dynamic_sampling could never "
                "fill a batch; take at least 2 or set rollout.dynamic_sampling=null",
                others=("dynamic_sampling",),
            )
        if self.min_response_tokens > self.max_response_tokens:
            yield Problem(
                "min_response_tokens",
                self.min_response_tokens,
                f"must not be above rollout.max_response_tokens ({self.max_response_tokens}); "
                "lower it or raise the maximum",
                others=("max_response_tokens",),
            )
