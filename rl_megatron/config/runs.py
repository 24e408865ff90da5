"""The runs, and the settings of different sections that must fit each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pydantic import Field, NonNegativeInt, PositiveInt

from rl_megatron.config.algorithm import AlgorithmConfig
from rl_megatron.config.backends import (
    ENGINES,
    Backend,
    backend_idle,
    backend_problems,
    zero_problems,
)
from rl_megatron.config.base import Idle, Problem, Strict
from rl_megatron.config.checkpoint import CheckpointConfig
from rl_megatron.config.data import (
    DataConfig,
    DataSource,
    PairDataConfig,
    PromptDataConfig,
    ResponseDataConfig,
)
from rl_megatron.config.deepspeed import DeepSpeedConfig
from rl_megatron.config.kernels import KernelConfig
from rl_megatron.config.layout import world_size_problems
from rl_megatron.config.loss import (
    GRPOLossConfig,
    RewardModelLossConfig,
)
from rl_megatron.config.model import ModelConfig, ReferenceConfig
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.parallel import ClusterConfig, ParallelConfig
from rl_megatron.config.rewards import (
    RewardConfig,
    RewardList,
    RewardModelConfig,
    reward_label,
    reward_problems,
)
from rl_megatron.config.rollout import RolloutConfig
from rl_megatron.config.train import GRPOTrainConfig, StepTrainConfig

DEFAULT_EVALUATION_TOKENS = 256


class LoggingConfig(Strict):
    """What is written beside `metrics.jsonl`."""

    tensorboard: bool = True
    """Write TensorBoard files too."""

    wandb_project: str | None = None
    """Send metrics to this Weights & Biases project; null: do not."""

    trace_shapes: bool = False
    """Log name, shape, dtype and layout of every tensor from data to gradient, once
    (--trace-shapes)."""

    rollouts_per_step: NonNegativeInt | None = 4
    """Rollouts of each rollout batch that are written to `rollouts.jsonl`; null: all of them."""


class EvaluationConfig(Strict):
    """Held-out prompts are answered greedily and the responses scored."""

    data: DataSource | None = None
    """Prompts, and the answers that rewards need; null: `data.eval`, if it is one set."""

    rewards: RewardList = ()
    """How responses are scored. Empty: by the rewards of the run, which only GRPO has."""

    max_rows: PositiveInt = 256
    """Rows used, from the first."""

    max_response_tokens: PositiveInt | None = None
    """A response is cut after this many tokens; null: `rollout.max_response_tokens` in GRPO, 256
    in the other runs."""

    batch_size: PositiveInt = 64
    """Prompts answered side by side."""


class RunBase(Strict):
    """What every run has."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """What the run is called: letters and digits, and after the first also . _ -"""

    seed: NonNegativeInt = 0
    """Decides new weights, the order of data and what is sampled."""

    output_dir: str = Field(default_factory=lambda run: f"runs/{run.get('name')}", min_length=1)
    """The run folder, made if it does not exist; if not set, runs/ and the name."""

    backend: Backend = "megatron"
    """megatron: any layout, models of the families in `models/families`. deepspeed: ZeRO on any
    number of ranks, any model that transformers builds. torch: one process, any such model, to
    debug and compare."""

    model: ModelConfig

    data: DataConfig

    parallel: ParallelConfig = ParallelConfig()

    deepspeed: DeepSpeedConfig = DeepSpeedConfig()

    cluster: ClusterConfig = ClusterConfig()

    optimizer: OptimizerConfig = OptimizerConfig()

    kernels: KernelConfig = KernelConfig()

    checkpoint: CheckpointConfig = CheckpointConfig()

    logging: LoggingConfig = LoggingConfig()

    evaluation: EvaluationConfig | None = None
    """Answer held-out prompts greedily and score the responses; null: do not."""

    @property
    def evaluation_data(self) -> DataSource | None:
        """Prompts of the evaluation."""
        only = self.data.held_out.get("")
        return (self.evaluation and self.evaluation.data) or only

    @property
    def evaluation_rewards(self) -> tuple[RewardConfig, ...]:
        """How responses are scored in the evaluation."""
        return self.evaluation.rewards if self.evaluation else ()

    @property
    def evaluation_max_response_tokens(self) -> int:
        """Length at which responses are cut in the evaluation."""
        own = self.evaluation and self.evaluation.max_response_tokens
        return own or DEFAULT_EVALUATION_TOKENS

    def idle(self) -> Mapping[str, Idle]:
        """What only another backend reads."""
        return backend_idle(self.backend)

    def problems(self) -> Iterable[Problem]:
        """Layouts that do not fit the cluster or the backend, and an incomplete evaluation."""
        if self.cluster.world_size is not None:
            yield from world_size_problems(self.parallel, self.cluster.world_size)
        yield from backend_problems(self.backend, self.model, self.parallel, self.cluster)
        if self.backend == "deepspeed":
            yield from zero_problems(self.deepspeed, self.model, self.optimizer)
        if self.evaluation is not None:
            yield from self._evaluation_problems(self.evaluation)

    def _evaluation_problems(self, evaluation: EvaluationConfig) -> Iterator[Problem]:
        if self.evaluation_data is None:
            text = "there are no held-out rows; set evaluation.data.path or data.eval.path"
            if self.data.held_out:
                text = (
                    "data.eval has several sets; say whose prompts are answered by "
                    "evaluation.data.path"
                )
            yield Problem("evaluation.data", None, text, others=("data.eval",))
        if not self.evaluation_rewards:
            yield Problem(
                "evaluation.rewards",
                [],
                "nothing says how responses are scored; list at least one, e.g. {name: answer_tag}",
            )
        yield from reward_problems(
            "evaluation.rewards",
            evaluation.rewards,
            self.evaluation_max_response_tokens,
            "evaluation.max_response_tokens",
        )

        for index, reward in enumerate(evaluation.rewards):
            if isinstance(reward, RewardModelConfig) and reward.normalize == "batch":
                yield Problem(
                    f"evaluation.rewards.{index}.normalize",
                    "batch",
                    "the mean would be 0 after every step; take none or fixed",
                )

    def _warmup_problems(self, num_steps: int, explained: str) -> Iterator[Problem]:
        if self.optimizer.lr_warmup_steps > num_steps:
            yield Problem(
                "optimizer.lr_warmup_steps",
                self.optimizer.lr_warmup_steps,
                f"must not be above the run's {num_steps} optimiser steps ({explained}); lower it",
                others=("train", "rollout"),
            )


class StepRunBase(RunBase):
    """What all but GRPO share: rows with responses, and training counted in optimiser steps."""

    data: ResponseDataConfig

    train: StepTrainConfig

    def problems(self) -> Iterable[Problem]:
        """Everything that does not fit."""
        yield from super().problems()
        if self.train.num_steps is not None:
            yield from self._warmup_problems(self.train.num_steps, "train.num_steps")


class SFTRun(StepRunBase):
    """Supervised fine-tuning: given responses are made more likely."""

    def idle(self) -> Mapping[str, Idle]:
        """Kernels of losses: this one is a plain sum."""
        reason = "the loss of supervised fine-tuning is a plain sum; remove this key"
        return {**super().idle(), "kernels.losses": Idle(reason, ())}


class RewardModelRun(StepRunBase):
    """Reward model: a scalar head learns to give chosen responses more than rejected ones."""

    data: PairDataConfig

    loss: RewardModelLossConfig = RewardModelLossConfig()

    def idle(self) -> Mapping[str, Idle]:
        """Answers to prompts, and kernels of another head."""
        reason = (
            "a reward model answers no prompts; remove this section, and set data.eval for its "
            "accuracy on held-out pairs"
        )
        idle = {"evaluation": Idle(reason, ())}
        reason = "a reward model has a head of one row; remove this key"
        keys = ("kernels.linear_logprob", "kernels.losses", "kernels.one_pass")
        return {**super().idle(), **idle, **dict.fromkeys(keys, Idle(reason, ()))}


class GRPORun(RunBase):
    """Group relative policy optimisation: the policy learns from rewards of its own responses."""

    reference: ReferenceConfig = ReferenceConfig()

    data: PromptDataConfig

    rollout: RolloutConfig = RolloutConfig()

    rewards: RewardList = Field(min_length=1)
    """At least one; the reward of a response is their weighted sum."""

    algorithm: AlgorithmConfig = AlgorithmConfig()

    loss: GRPOLossConfig = GRPOLossConfig()

    train: GRPOTrainConfig

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term is used, so that reference log-probs are needed."""
        return self.loss.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def rollout_sequences(self) -> int:
        """Responses of one rollout batch."""
        return self.rollout.prompts_per_batch * self.rollout.group_size

    @property
    def mini_batch_size(self) -> int:
        """Sequences of one optimiser step."""
        return self.train.mini_batch_size or self.rollout_sequences

    @property
    def num_mini_batches(self) -> int:
        """Optimiser steps of one pass over a rollout batch."""
        return self.rollout_sequences // self.mini_batch_size

    @property
    def num_steps(self) -> int:
        """Optimiser steps of the run."""
        return self.train.num_rollout_batches * self.train.ppo_epochs * self.num_mini_batches

    @property
    def evaluation_max_response_tokens(self) -> int:
        """Length at which responses are cut in evaluation."""
        own = self.evaluation and self.evaluation.max_response_tokens
        return own or self.rollout.max_response_tokens

    @property
    def evaluation_rewards(self) -> tuple[RewardConfig, ...]:
        """How responses are scored in the evaluation."""
        return super().evaluation_rewards or self.rewards

    def idle(self) -> Mapping[str, Idle]:
        """What needs a KL, an evaluation, or a loss of single tokens, and does not have it."""
        idle = dict(super().idle())
        if not self.needs_reference:
            reason = (
                "no KL is used; set loss.use_kl_loss=true or algorithm.use_kl_in_reward=true, or "
                "remove this key"
            )
            switches = ("loss.use_kl_loss", "algorithm.use_kl_in_reward")
            idle["reference"] = Idle(reason, switches)
        if self.evaluation is None:
            reason = "evaluation is null; add an evaluation section, or remove this key"
            idle["data.eval"] = Idle(reason, ("evaluation",))
        if self.loss.loss_mode == "gspo":
            reason = (
                "the loss of loss.loss_mode gspo is known only after a whole sequence; remove this "
                "key or take another loss_mode"
            )
            idle["kernels.one_pass"] = Idle(reason, ("loss.loss_mode",))
        return idle

    def problems(self) -> Iterable[Problem]:
        """Everything that does not fit."""
        yield from super().problems()
        yield from reward_problems(
            "rewards",
            self.rewards,
            self.rollout.max_response_tokens,
            "rollout.max_response_tokens",
        )
        yield from self._batch_problems()
        yield from self._algorithm_problems()
        yield from self._warmup_problems(
            self.num_steps, "train.num_rollout_batches x train.ppo_epochs x mini-batches"
        )

    def _batch_problems(self) -> Iterator[Problem]:
        size, total = self.mini_batch_size, self.rollout_sequences
        if total % size:
            fitting = [n for n in range(1, total + 1) if total % n == 0]
            near = [max(n for n in fitting if n < size), *[n for n in fitting if n > size][:1]]
            yield Problem(
                "train.mini_batch_size",
                size,
                f"must divide the rollout batch of {total} sequences (rollout.prompts_per_batch "
                f"{self.rollout.prompts_per_batch} x rollout.group_size "
                f"{self.rollout.group_size}); take {' or '.join(map(str, near))}",
                others=("rollout.prompts_per_batch", "rollout.group_size"),
            )

    def _algorithm_problems(self) -> Iterator[Problem]:
        estimator = self.algorithm.adv_estimator
        if self.rollout.group_size == 1 and estimator != "reinforce_plus_plus":
            yield Problem(
                "rollout.group_size",
                1,
                f"algorithm.adv_estimator {estimator} compares the responses of a group, so every "
                "advantage would be 0; take at least 2",
                others=("algorithm.adv_estimator",),
            )
        if self.loss.use_kl_loss and self.algorithm.use_kl_in_reward:
            yield Problem(
                "algorithm.use_kl_in_reward",
                True,
                "loss.use_kl_loss is true too, and the KL would count twice; set one to false",
                others=("loss.use_kl_loss",),
            )
        yield from self._dynamic_problems()
        engine = ENGINES[self.backend]
        if self.rollout.engine not in (None, engine):
            yield Problem(
                "rollout.engine",
                self.rollout.engine,
                f"does not sample from the weights of backend {self.backend}; remove this key or "
                "change backend",
                others=("backend",),
            )

    def _dynamic_problems(self) -> Iterator[Problem]:
        dynamic = self.rollout.dynamic_sampling
        labels = [reward_label(reward) for reward in self.rewards]
        if dynamic is not None and dynamic.reward not in (None, *labels):
            yield Problem(
                "rollout.dynamic_sampling.reward",
                dynamic.reward,
                f"is not a reward of this run; take one of {', '.join(labels)}, or null for their "
                "sum",
                others=("rewards",),
            )
        for index, reward in enumerate(self.rewards if dynamic is not None else ()):
            if isinstance(reward, RewardModelConfig) and reward.normalize == "batch":
                yield Problem(
                    f"rewards.{index}.normalize",
                    "batch",
                    "with rollout.dynamic_sampling a batch is drawn in parts, which would each be "
                    "measured by its own mean; take fixed",
                    others=("rollout.dynamic_sampling",),
                )
