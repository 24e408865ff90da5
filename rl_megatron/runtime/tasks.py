"""Everything one algorithm needs, built from its run: models, data, evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rl_megatron.checkpoint.ref_cache import RefCache
from rl_megatron.config.data import DataSource
from rl_megatron.config.preference_runs import DPORun, KTORun, ReferencedRun
from rl_megatron.config.rewards import RewardConfig
from rl_megatron.config.runs import GRPORun, RewardModelRun, RunBase, SFTRun
from rl_megatron.config.train import TrainBase
from rl_megatron.data.packing import MicroBatching
from rl_megatron.data.prompts import load_prompts
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.errors import DataError
from rl_megatron.interfaces.batch import JudgedBatch, PackedBatch
from rl_megatron.interfaces.protocols import (
    PolicyBackend,
    RewardBackend,
    Scorer,
    WeightSync,
)
from rl_megatron.interfaces.records import Prompt, Sampling
from rl_megatron.parallel.process import Process
from rl_megatron.runtime.batches import (
    Batches,
    all_parts,
    judged_batches,
    pair_batches,
    row_cursor,
    sft_batches,
)
from rl_megatron.runtime.build import (
    build_engine,
    build_policy,
    build_reference,
    build_tokenizer,
    waiting_reference,
)
from rl_megatron.runtime.drift import KLSnapshot
from rl_megatron.runtime.evaluation import Evaluation
from rl_megatron.runtime.groups import GroupSampler
from rl_megatron.runtime.reference_cache import (
    cached_reference,
    complete_cache,
    reference_scorer,
)
from rl_megatron.runtime.reward_models import RewardModels, build_reward_model
from rl_megatron.runtime.score import build_rewards
from rl_megatron.weight_sync import InProcessSync


@dataclass(frozen=True)
class SFTTask:
    """See `build_sft`."""

    policy: PolicyBackend
    batches: Batches[PackedBatch]
    evaluate: Callable[[], dict[str, float]]


@dataclass(frozen=True)
class RewardModelTask:
    """See `build_reward_task`."""

    model: RewardBackend
    batches: Batches[PackedBatch]


@dataclass(frozen=True)
class DPOTask:
    """See `build_dpo`."""

    policy: PolicyBackend
    reference: Scorer | None
    batches: Batches[PackedBatch]
    evaluate: Callable[[], dict[str, float]]
    drift: KLSnapshot | None


@dataclass(frozen=True)
class KTOTask:
    """See `build_kto`."""

    policy: PolicyBackend
    reference: Scorer
    batches: Batches[JudgedBatch]
    evaluate: Callable[[], dict[str, float]]
    drift: KLSnapshot | None


@dataclass(frozen=True)
class GRPOTask:
    """See `build_grpo`."""

    policy: PolicyBackend
    reference: Scorer | None
    groups: GroupSampler
    sampling: Sampling
    evaluate: Callable[[], dict[str, float]]


def build_sft(run: SFTRun, process: Process) -> SFTTask:
    """Policy and examples."""
    tokenizer = build_tokenizer(run)
    batches = sft_batches(run, process, tokenizer)
    policy = build_policy(run, process, _micro_batching(run.train))
    return SFTTask(policy, batches, _evaluator(run, process, policy, tokenizer))


def build_reward_task(run: RewardModelRun, process: Process) -> RewardModelTask:
    """Reward model and preference pairs."""
    batches = pair_batches(run, process, build_tokenizer(run))
    return RewardModelTask(build_reward_model(run, process, _micro_batching(run.train)), batches)


def build_dpo(run: DPORun, process: Process) -> DPOTask:
    """Policy, reference if the loss has one, and preference pairs."""
    tokenizer = build_tokenizer(run)
    batches = pair_batches(run, process, tokenizer)
    micro_batching = _micro_batching(run.train)
    policy = build_policy(run, process, micro_batching)
    reference = None
    if run.needs_reference:
        reference = _scored_once(run, process, micro_batching, policy, batches.everything)
    drift = _drift(run, process, policy, tokenizer) if run.watches_drift else None
    return DPOTask(policy, reference, batches, _evaluator(run, process, policy, tokenizer), drift)


def build_kto(run: KTORun, process: Process) -> KTOTask:
    """Policy, reference, and responses with verdicts."""
    tokenizer = build_tokenizer(run)
    batches = judged_batches(run, process, tokenizer)
    micro_batching = _micro_batching(run.train)
    policy = build_policy(run, process, micro_batching)
    reference = _scored_once(run, process, micro_batching, policy, all_parts(batches))
    drift = _drift(run, process, policy, tokenizer) if run.watches_drift else None
    return KTOTask(policy, reference, batches, _evaluator(run, process, policy, tokenizer), drift)


def build_reference_cache(run: DPORun | KTORun, process: Process) -> RefCache:
    """The reference cache of a run, every row in it, before the run. Collective."""
    tokenizer = build_tokenizer(run)
    if isinstance(run, KTORun):
        everything = all_parts(judged_batches(run, process, tokenizer))
    else:
        everything = pair_batches(run, process, tokenizer).everything
    scorer = reference_scorer(run, process, _micro_batching(run.train))
    return complete_cache(run, process, scorer, everything)


def build_grpo(run: GRPORun, process: Process) -> GRPOTask:
    """Policy, reference if a KL is used, and what samples and scores groups of responses."""
    tokenizer = build_tokenizer(run)
    rollout, data, micro_batching = run.rollout, run.data, _micro_batching(run.train)
    models = RewardModels(run, process, micro_batching, tokenizer)
    rewards = build_rewards(run.rewards, rollout.max_response_tokens, models.load)
    prompts = load_prompts(data.train, tokenizer, data.max_prompt_length, data.overlong)
    _check_answers(prompts, run.rewards, data.train, "data.train")
    cursor = row_cursor(run, prompts)
    sampling = Sampling(
        temperature=rollout.temperature,
        max_response_tokens=rollout.max_response_tokens,
        min_response_tokens=rollout.min_response_tokens,
        stop_token_ids=_stop_ids(tokenizer, rollout.stop_token_ids),
    )
    policy = build_policy(run, process, micro_batching, temperature=rollout.temperature)
    reference = None
    if run.needs_reference:
        reference = build_reference(run, process, micro_batching, policy, rollout.temperature)
    sync = _sync(policy, process, tokenizer, rollout.max_concurrent_sequences)
    return GRPOTask(
        policy=policy,
        reference=reference,
        groups=GroupSampler(sync, rewards, prompts, cursor, sampling, rollout, run.seed, process),
        sampling=sampling,
        evaluate=_evaluator(run, process, policy, tokenizer, models, sync),
    )


def _sync(
    policy: PolicyBackend, process: Process, tokenizer: Tokenizer, max_concurrent_sequences: int
) -> WeightSync:
    """What gives an engine that samples from the policy."""
    engine = build_engine(policy, process, tokenizer, max_concurrent_sequences)
    return InProcessSync(policy, engine)


def _micro_batching(train: TrainBase) -> MicroBatching:
    return MicroBatching(
        train.micro_batch_size, train.max_tokens_per_micro_batch, packed=train.packed
    )


def _stop_ids(tokenizer: Tokenizer, more: Sequence[int] = ()) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*tokenizer.stop_ids, *more)))


def _check_answers(
    prompts: Sequence[Prompt], rewards: Sequence[RewardConfig], source: DataSource, setting: str
) -> None:
    comparing = [reward.name for reward in rewards if reward.needs_answer]
    if comparing and all(prompt.answer is None for prompt in prompts):
        raise DataError(
            f"{setting}.answer_key = {source.answer_key!r}: no row of {source.path} has this "
            f"field, and the reward {comparing[0]} compares with it; name the field that holds "
            "the answers, or take another reward"
        )


def _scored_once(
    run: ReferencedRun,
    process: Process,
    micro_batching: MicroBatching,
    policy: PolicyBackend,
    everything: Callable[[], Iterator[PackedBatch]],
) -> Scorer:
    """What gives reference log-probs; call it before the first step.

    Args:
        everything: All that it will be asked about, in parts.
    """
    if not run.reference.precompute_ref_logprobs:
        return build_reference(run, process, micro_batching, policy)
    scorer = reference_scorer(run, process, micro_batching, policy)
    return cached_reference(run, process, scorer, everything)


def _drift(
    run: ReferencedRun, process: Process, policy: PolicyBackend, tokenizer: Tokenizer
) -> KLSnapshot:
    """What measures the KL to the reference; call it before the first step."""
    assert run.evaluation is not None, "config sees to it"
    prompts, _ = _evaluation_prompts(run, tokenizer)
    sampling = Sampling(
        temperature=1.0,
        max_response_tokens=run.evaluation_max_response_tokens,
        stop_token_ids=_stop_ids(tokenizer),
    )
    sync = _sync(policy, process, tokenizer, run.evaluation.batch_size)
    reference = waiting_reference(run, process, _micro_batching(run.train), policy)
    return KLSnapshot(run.drift, prompts, sampling, sync, policy, reference, run.seed)


def _evaluation_prompts(run: RunBase, tokenizer: Tokenizer) -> tuple[list[Prompt], str]:
    """The prompts of the evaluation, and the setting that they come from."""
    assert run.evaluation is not None and run.evaluation_data is not None
    limit = getattr(run.data, "max_prompt_length", None) or getattr(run.data, "max_length", 0)
    setting = "data.eval" if run.evaluation.data is None else "evaluation.data"
    return (
        load_prompts(run.evaluation_data, tokenizer, limit, run.data.overlong, setting),
        setting,
    )


def _evaluator(
    run: RunBase,
    process: Process,
    policy: PolicyBackend,
    tokenizer: Tokenizer,
    models: RewardModels | None = None,
    sync: WeightSync | None = None,
) -> Callable[[], dict[str, float]]:
    """What answers and scores held-out prompts; says nothing where the run has no evaluation."""
    if run.evaluation is None or run.evaluation_data is None:
        return dict
    settings = run.evaluation
    if sync is None:
        sync = _sync(policy, process, tokenizer, settings.batch_size)
    prompts, setting = _evaluation_prompts(run, tokenizer)
    _check_answers(prompts, run.evaluation_rewards, run.evaluation_data, setting)
    max_tokens = run.evaluation_max_response_tokens
    models = models or RewardModels(run, process, _micro_batching(run.train), tokenizer)
    evaluation = Evaluation(
        prompts=prompts[: settings.max_rows],
        rewards=build_rewards(
            run.evaluation_rewards,
            max_tokens,
            models.load,
            "evaluation.rewards" if settings.rewards else "rewards",
            in_evaluation=True,
        ),
        sampling=Sampling(
            temperature=0.0,
            max_response_tokens=max_tokens,
            stop_token_ids=_stop_ids(tokenizer),
        ),
        batch_size=settings.batch_size,
        seed=run.seed,
    )
    return lambda: evaluation.run(sync, process)
