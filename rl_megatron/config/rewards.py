"""The rewards of a run: a list of these, each with its weight; their weighted sum is the reward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic import Strict as StrictMode

from rl_megatron.config.base import Idle, Problem, Strict


class RewardBase(Strict):
    """What every reward has."""

    weight: float = 1.0
    """Factor of this reward in the sum; 0: only record it."""

    needs_answer: ClassVar[bool] = False
    """Whether a row without a known answer is not scored."""


class MathAnswerConfig(RewardBase):
    """1 where the response's answer equals the known answer as mathematics, else 0."""

    needs_answer: ClassVar[bool] = True

    name: Literal["math_answer"]
    """A LaTeX box, a `####` marker or an answer tag, compared by math-verify."""

    extract: Literal["auto", "boxed", "marker", "answer_tag"] = "auto"
    """Where the answer is read: the last `\\boxed{}`, the last `####` line, the single
    `<answer>`, or (auto) whichever of them there is."""

    timeout_seconds: PositiveFloat = 5.0
    """A comparison that takes longer counts as not equal."""


class AnswerTagConfig(RewardBase):
    """1 where the text of the single <answer>..</answer> is exactly the known answer, else 0."""

    needs_answer: ClassVar[bool] = True

    name: Literal["answer_tag"]
    """The text in the answer tag, compared letter by letter."""


class FormatTagsConfig(RewardBase):
    """1 where the response has the form <think>..</think> <answer>..</answer>, else 0."""

    name: Literal["format_tags"]
    """The form of the response, whatever it says."""

    think: bool = True
    """Whether one <think> block must precede the one <answer> block."""


class LengthConfig(RewardBase):
    """Minus `penalty` for a response outside the bounds, else 0."""

    name: Literal["length"]
    """The number of response tokens."""

    min_tokens: NonNegativeInt = 0
    """Shortest response without a penalty."""

    max_tokens: PositiveInt | None = None
    """Longest response without a penalty; null: no bound."""

    penalty: PositiveFloat = 1.0
    """What a response outside the bounds loses."""

    def problems(self) -> Iterable[Problem]:
        """Bounds that cross, or no bound at all."""
        if self.max_tokens is None and self.min_tokens == 0:
            yield Problem("min_tokens", 0, "no bound is set; set min_tokens or max_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            yield Problem(
                "min_tokens",
                self.min_tokens,
                f"must not be above max_tokens ({self.max_tokens}); lower it",
                others=("max_tokens",),
            )


class OverlongConfig(RewardBase):
    """A penalty that grows linearly over the last tokens before the maximum (DAPO, eq. 13)."""

    name: Literal["overlong"]
    """The number of response tokens beyond `rollout.max_response_tokens` - `buffer_tokens`."""

    buffer_tokens: PositiveInt
    """Tokens before `rollout.max_response_tokens` over which the penalty grows."""

    penalty_factor: PositiveFloat = 1.0
    """The penalty of a response of `rollout.max_response_tokens` tokens."""


class PythonConfig(RewardBase):
    """A function of yours: (prompt, response, answer) -> float, or None for "not scored"."""

    name: Literal["python"]
    """A function of yours."""

    path: str = Field(pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_]*$")
    """`package.module:function` or `path/to/file.py:function`."""


class RewardModelConfig(RewardBase):
    """The score that a reward model gives to prompt and response as they were sampled."""

    name: Literal["reward_model"]
    """A frozen model on the ranks and in the layout of the policy. It reads the last token of a
    response, also of one that was cut."""

    path: str = Field(min_length=1)
    """Its Hugging Face folder, or a checkpoint of recipes/reward_model. Its tokenizer must be the
    policy's."""

    label: str = Field(default="reward_model", pattern=r"^[A-Za-z0-9_]+$")
    """What it is recorded as, for runs with several."""

    normalize: Literal["none", "fixed", "batch"] = "none"
    """Before the weight is applied; scores are recorded as they are. fixed: (score - `mean`) /
    `std`. batch: the same with mean and standard deviation of the responses of the rollout batch;
    not in evaluation, where they would hide every change."""

    mean: float = 0.0
    """Subtracted by `normalize` fixed: e.g. `evaluation/rewards/mean` of the model's training."""

    std: PositiveFloat = 1.0
    """Divisor of `normalize` fixed: e.g. `evaluation/rewards/std`."""

    def problems(self) -> Iterable[Problem]:
        """A normalisation by 0 and 1."""
        if self.normalize == "fixed" and not {"mean", "std"} & self.model_fields_set:
            yield Problem(
                "normalize",
                "fixed",
                "changes nothing without a mean or a std; set them, e.g. to "
                "evaluation/rewards/mean and evaluation/rewards/std of the model's training",
                others=("mean", "std"),
            )

    def idle(self) -> Mapping[str, Idle]:
        """Mean and standard deviation that nobody reads."""
        if self.normalize == "fixed":
            return {}
        off = Idle("it is for normalize fixed; set that, or remove this key", ("normalize",))
        return dict.fromkeys(("mean", "std"), off)


RewardConfig = Annotated[
    MathAnswerConfig
    | AnswerTagConfig
    | FormatTagsConfig
    | LengthConfig
    | OverlongConfig
    | PythonConfig
    | RewardModelConfig,
    Field(discriminator="name"),
]

RewardList = Annotated[tuple[RewardConfig, ...], StrictMode(False)]


def reward_label(reward: RewardConfig) -> str:
    """What the reward is recorded as; unique within a run."""
    if isinstance(reward, RewardModelConfig):
        return reward.label
    return reward.path.rpartition(":")[2] if isinstance(reward, PythonConfig) else reward.name


def reward_problems(
    key: str, rewards: tuple[RewardConfig, ...], max_response_tokens: int, max_key: str
) -> Iterable[Problem]:
    """Rewards under `key` that no response of at most `max_response_tokens` tokens could earn."""
    for index, reward in enumerate(rewards):
        if isinstance(reward, OverlongConfig) and reward.buffer_tokens > max_response_tokens:
            yield Problem(
                f"{key}.{index}.buffer_tokens",
                reward.buffer_tokens,
                f"must not be above {max_key} ({max_response_tokens}): even an empty response "
                "would be punished; lower it",
                others=(max_key,),
            )
        if isinstance(reward, LengthConfig) and reward.min_tokens > max_response_tokens:
            yield Problem(
                f"{key}.{index}.min_tokens",
                reward.min_tokens,
                f"is above {max_key} ({max_response_tokens}): every response would be punished; "
                "lower it",
                others=(max_key,),
            )
    labels = [reward_label(reward) for reward in rewards]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            yield Problem(
                f"{key}.{index}.name",
                rewards[index].name,
                f"is recorded as {label!r}, and so is {key}.{labels.index(label)}; keep one of "
                "them, rename the function, or give the reward model another label",
            )
