"""The three runs, and the settings of different sections that must fit each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from rl_megatron.config.algorithm import AlgorithmConfig
from rl_megatron.config.base import Problem, Strict
from rl_megatron.config.data import DataSource, PromptDataConfig, ResponseDataConfig
from rl_megatron.config.layout import world_size_problems
from rl_megatron.config.loss import DPOLossConfig, GRPOLossConfig
from rl_megatron.config.model import ModelConfig, ReferenceConfig
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.parallel import ClusterConfig, ParallelConfig
from rl_megatron.config.rewards import RewardList, reward_problems
from rl_megatron.config.rollout import RolloutConfig
from rl_megatron.config.train import GRPOTrainConfig, StepTrainConfig

DEFAULT_EVALUATION_TOKENS = 256


class LoggingConfig(Strict):
    """What is written beside `metrics.jsonl`."""

    tensorboard: bool = True
    """Write TensorBoard files too."""

    wandb_project: str | None = None
    """Send metrics to this Weights & Biases project; null: do not."""

    rollouts_per_step: NonNegativeInt = 4
    """Rollouts of each rollout batch that are written to `rollouts.jsonl`."""


class EvaluationConfig(Strict):
    """Answer held-out prompts greedily and score the responses."""

    data: DataSource | None = None
    """Prompts, and the answers that rewards need; null: `data.eval`."""

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
    """What the run is called in logs: letters, digits, and . _ - after the first."""

    seed: NonNegativeInt = 0
    """Decides new weights, the order of data and what is sampled."""

    output_dir: str = Field(min_length=1)
    """The run folder, made if it does not exist. Default: runs/ and the name."""

    backend: Literal["megatron", "torch"] = "megatron"
    """megatron: any layout. torch: one process, a transformers model, to debug and compare."""

    model: ModelConfig

    parallel: ParallelConfig = ParallelConfig()

    cluster: ClusterConfig = ClusterConfig()

    optimizer: OptimizerConfig = OptimizerConfig()

    logging: LoggingConfig = LoggingConfig()

    evaluation: EvaluationConfig | None = None
    """null: no evaluation of generated text."""

    @model_validator(mode="before")
    @classmethod
    def _name_the_run_folder(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("name"), str):
            return {"output_dir": f"runs/{data['name']}", **data}
        return data

    @property
    def evaluation_max_response_tokens(self) -> int:
        """Length at which responses are cut in evaluation."""
        own = self.evaluation and self.evaluation.max_response_tokens
        return own or DEFAULT_EVALUATION_TOKENS

    def problems(self) -> Iterable[Problem]:
        """Layouts that do not fit the cluster or the backend."""
        world_size = self.cluster.world_size
        if world_size is not None:
            nodes, gpus = self.cluster.num_nodes, self.cluster.gpus_per_node
            ranks = f"cluster.num_nodes ({nodes}) x cluster.gpus_per_node ({gpus}) = world size"
            yield from world_size_problems(self.parallel, world_size, ranks)
        if self.backend == "torch":
            yield from self._torch_problems()

    def _torch_problems(self) -> Iterator[Problem]:
        for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            size = getattr(self.parallel, key)
            if size > 1:
                yield Problem(
                    f"parallel.{key}",
                    size,
                    "backend torch runs in one process; set it to 1 or set backend=megatron",
                    others=("backend",),
                )
        if (self.cluster.world_size or 1) > 1:
            yield Problem(
                "cluster.gpus_per_node",
                self.cluster.gpus_per_node,
                f"backend torch runs in one process, not {self.cluster.world_size}; set "
                "cluster.num_nodes and this to 1, or set backend=megatron",
                others=("backend", "cluster.num_nodes"),
            )


def evaluation_problems(run: SFTRun | DPORun | GRPORun, *, has_rewards: bool) -> Iterator[Problem]:
    """An evaluation without prompts or without a score."""
    if run.evaluation is None:
        return
    if run.evaluation.data is None and run.data.eval is None:
        yield Problem(
            "evaluation.data",
            None,
            "there are no held-out rows; set evaluation.data.path or data.eval.path",
            others=("data.eval",),
        )
    if not run.evaluation.rewards and not has_rewards:
        yield Problem(
            "evaluation.rewards",
            [],
            "nothing says how responses are scored; list at least one, e.g. {name: answer_tag}",
        )
    yield from reward_problems(
        "evaluation.rewards",
        run.evaluation.rewards,
        run.evaluation_max_response_tokens,
        "evaluation.max_response_tokens",
    )


def warmup_problems(num_steps: int | None, warmup_steps: int, explained: str) -> Iterator[Problem]:
    """A warm-up that outlasts a run of `num_steps` (None: not known before the data is read)."""
    if num_steps is not None and warmup_steps > num_steps:
        yield Problem(
            "optimizer.lr_warmup_steps",
            warmup_steps,
            f"must not be above the run's optimiser steps ({num_steps}: {explained}); lower it",
            others=("train", "rollout"),
        )


class SFTRun(RunBase):
    """Supervised fine-tuning: the log-prob of given responses is raised."""

    data: ResponseDataConfig

    train: StepTrainConfig

    def problems(self) -> Iterable[Problem]:
        """Everything that does not fit."""
        yield from super().problems()
        yield from evaluation_problems(self, has_rewards=False)
        steps, warmup = self.train.num_steps, self.optimizer.lr_warmup_steps
        yield from warmup_problems(steps, warmup, "train.num_steps")


class DPORun(RunBase):
    """Direct preference optimisation: chosen responses against rejected ones."""

    reference: ReferenceConfig = ReferenceConfig()

    data: ResponseDataConfig

    loss: DPOLossConfig = DPOLossConfig()

    train: StepTrainConfig

    def problems(self) -> Iterable[Problem]:
        """Everything that does not fit."""
        yield from super().problems()
        yield from evaluation_problems(self, has_rewards=False)
        steps, warmup = self.train.num_steps, self.optimizer.lr_warmup_steps
        yield from warmup_problems(steps, warmup, "train.num_steps")


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

    def idle(self) -> Mapping[str, str]:
        """The reference and its KL controller without a KL; held-out prompts without evaluation."""
        idle: dict[str, str] = {}
        if not self.needs_reference:
            off = (
                "no KL is used; set loss.use_kl_loss=true or algorithm.use_kl_in_reward=true, or "
                "remove this key"
            )
            idle |= dict.fromkeys(("reference", "algorithm.kl_ctrl"), off)
        if self.evaluation is None:
            idle["data.eval"] = "evaluation is null; add an evaluation section or remove this key"
        return idle

    def problems(self) -> Iterable[Problem]:
        """Everything that does not fit."""
        yield from super().problems()
        yield from evaluation_problems(self, has_rewards=True)
        yield from reward_problems(
            "rewards",
            self.rewards,
            self.rollout.max_response_tokens,
            "rollout.max_response_tokens",
        )
        yield from self._batch_problems()
        yield from self._algorithm_problems()
        explained = "rollout batches x epochs x mini-batches"
        yield from warmup_problems(self.num_steps, self.optimizer.lr_warmup_steps, explained)

    def _batch_problems(self) -> Iterator[Problem]:
        size, total = self.mini_batch_size, self.rollout_sequences
        if total % size:
            fitting = [n for n in range(1, total + 1) if total % n == 0]
            below = max(n for n in fitting if n < size) if size > 1 else 1
            near = [below, *[n for n in fitting if n > size][:1]]
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
        if self.rollout.group_size == 1:
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
        if self.backend == "torch" and self.rollout.engine == "megatron":
            yield Problem(
                "rollout.engine",
                "megatron",
                "samples from Megatron's weights, which backend torch does not have; set "
                "rollout.engine=hf or backend=megatron",
                others=("backend",),
            )
