"""Everything one algorithm needs, built from its run: models, data, evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rl_megatron.checkpoint.ref_cache import RefCache
from rl_megatron.config.data import DataSource, JudgedSource, PairSource
from rl_megatron.config.rewards import RewardConfig
from rl_megatron.config.runs import (
    DPORun,
    GRPORun,
    KTORun,
    ReferencedRun,
    RewardModelRun,
    RunBase,
    SFTRun,
    StepRunBase,
)
from rl_megatron.config.train import TrainBase
from rl_megatron.data.examples import Example, JudgedExample, PreferencePair
from rl_megatron.data.packing import MicroBatching, pack_judged, pack_preferences, pack_sft
from rl_megatron.data.preferences import load_preferences
from rl_megatron.data.prompts import load_prompts
from rl_megatron.data.sampler import PositionSampler, RowCursor, data_digest
from rl_megatron.data.sft import load_sft
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.data.unpaired import borrow_responses, load_unpaired
from rl_megatron.errors import DataError
from rl_megatron.interfaces.batch import JudgedBatch, PackedBatch
from rl_megatron.interfaces.protocols import (
    PolicyBackend,
    RewardBackend,
    RolloutEngine,
    Scorer,
    WeightSync,
)
from rl_megatron.interfaces.records import Prompt, Sampling
from rl_megatron.parallel.process import Process
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

Row = TypeVar("Row", Example, PreferencePair, JudgedExample)
Batch = TypeVar("Batch", PackedBatch, JudgedBatch)

# Of a part of the data that is scored together, for each data-parallel rank.
_ROWS_PER_RANK = 128


@dataclass(frozen=True)
class Batches(Generic[Batch]):
    """Mini-batches of a data set, one for each optimiser step.

    Attributes:
        num_steps: Steps of the run.
        cursor: How far the run is in the rows.
        next: The batch of the next step.
        held_out: All held-out rows of each set, by name; one that has none is called "".
        everything: All rows, held-out ones too, in parts of moderate size.
    """

    num_steps: int
    cursor: RowCursor
    next: Callable[[], Batch]
    held_out: Mapping[str, Batch]
    everything: Callable[[], Iterator[Batch]]


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
    sync: WeightSync
    groups: GroupSampler
    sampling: Sampling
    evaluate: Callable[[], dict[str, float]]


def build_sft(run: SFTRun, process: Process) -> SFTTask:
    """Policy and examples."""
    tokenizer = build_tokenizer(run)

    def load(source: DataSource, setting: str) -> list[Example]:
        data = run.data
        return load_sft(source, tokenizer, data.max_length, data.overlong, setting)

    batches = _batches(run, load, pack_sft, process)
    policy = build_policy(run, process, _micro_batching(run.train))
    return SFTTask(policy, batches, _evaluator(run, process, policy, tokenizer))


def build_reward_task(run: RewardModelRun, process: Process) -> RewardModelTask:
    """Reward model and preference pairs."""
    batches = _pairs(run, process, build_tokenizer(run))
    return RewardModelTask(build_reward_model(run, process, _micro_batching(run.train)), batches)


def build_dpo(run: DPORun, process: Process) -> DPOTask:
    """Policy, reference if the loss has one, and preference pairs."""
    tokenizer = build_tokenizer(run)
    batches = _pairs(run, process, tokenizer)
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
    batches = _judged(run, process, tokenizer)
    micro_batching = _micro_batching(run.train)
    policy = build_policy(run, process, micro_batching)
    reference = _scored_once(run, process, micro_batching, policy, _all_parts(batches))
    drift = _drift(run, process, policy, tokenizer) if run.watches_drift else None
    return KTOTask(policy, reference, batches, _evaluator(run, process, policy, tokenizer), drift)


def build_reference_cache(run: DPORun | KTORun, process: Process) -> RefCache:
    """The reference cache of a run, every row in it, before the run. Collective."""
    tokenizer = build_tokenizer(run)
    if isinstance(run, KTORun):
        everything = _all_parts(_judged(run, process, tokenizer))
    else:
        everything = _pairs(run, process, tokenizer).everything
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
    cursor = _cursor(run, prompts)
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
    engine = build_engine(policy, process, tokenizer, rollout.max_concurrent_sequences)
    return GRPOTask(
        policy=policy,
        reference=reference,
        sync=InProcessSync(policy, engine),
        groups=GroupSampler(engine, rewards, prompts, cursor, sampling, rollout, run.seed, process),
        sampling=sampling,
        evaluate=_evaluator(run, process, policy, tokenizer, models, engine),
    )


def _pairs(
    run: RewardModelRun | DPORun, process: Process, tokenizer: Tokenizer
) -> Batches[PackedBatch]:
    def load(source: DataSource, setting: str) -> list[PreferencePair]:
        data = run.data
        margin_key = source.margin_key if isinstance(source, PairSource) else None
        return load_preferences(
            source, tokenizer, data.max_length, data.overlong, setting, margin_key
        )

    return _batches(run, load, pack_preferences, process)


def _judged(run: KTORun, process: Process, tokenizer: Tokenizer) -> Batches[JudgedBatch]:
    def load(source: DataSource, setting: str) -> list[JudgedExample]:
        assert isinstance(source, JudgedSource), "a run of KTO has no other"
        data = run.data
        rows = load_unpaired(source, tokenizer, data.max_length, data.overlong, setting)
        if run.loss.loss_type == "apo_zero_unpaired":
            return rows
        return borrow_responses(rows, data.max_length, setting)

    return _batches(run, load, pack_judged, process)


def _all_parts(batches: Batches[JudgedBatch]) -> Callable[[], Iterator[PackedBatch]]:
    """Rows and mismatched responses alike, for a reference."""
    return lambda: (part for batch in batches.everything() for part in batch.parts)


def _micro_batching(train: TrainBase) -> MicroBatching:
    return MicroBatching(
        train.micro_batch_size, train.max_tokens_per_micro_batch, packed=train.packed
    )


def _stop_ids(tokenizer: Tokenizer, more: Sequence[int] = ()) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*tokenizer.stop_ids, *more)))


def _batches(
    run: StepRunBase,
    load: Callable[[DataSource, str], list[Row]],
    pack: Callable[[list[Row]], Batch],
    process: Process,
) -> Batches[Batch]:
    rows = load(run.data.train, "data.train")
    size = run.train.global_batch_size
    cursor = _cursor(run, rows)
    num_steps = run.train.num_steps
    if num_steps is None:
        assert run.train.num_epochs is not None
        num_steps = math.ceil(len(rows) * run.train.num_epochs / size)
    held_out = {
        name: load(source, f"data.eval.{name}".rstrip("."))
        for name, source in run.data.held_out.items()
    }
    part = _ROWS_PER_RANK * process.layout.data

    def everything() -> Iterator[Batch]:
        for some in (rows, *held_out.values()):
            for start in range(0, len(some), part):
                yield pack(some[start : start + part])

    return Batches(
        num_steps=num_steps,
        cursor=cursor,
        next=lambda: pack([rows[i] for i in cursor.take(size)]),
        held_out={name: pack(some) for name, some in held_out.items()},
        everything=everything,
    )


def _cursor(run: RunBase, rows: Sequence[object]) -> RowCursor:
    order = PositionSampler(len(rows), run.seed, run.data.shuffle)
    return RowCursor(order, data_digest(rows), run.checkpoint.allows("data.train"))


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
    engine = build_engine(policy, process, tokenizer, run.evaluation.batch_size)
    reference = waiting_reference(run, process, _micro_batching(run.train), policy)
    return KLSnapshot(run.drift, prompts, sampling, engine, policy, reference, run.seed)


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
    engine: RolloutEngine | None = None,
) -> Callable[[], dict[str, float]]:
    """What answers and scores held-out prompts; says nothing where the run has no evaluation."""
    if run.evaluation is None or run.evaluation_data is None:
        return dict
    settings = run.evaluation
    engine = engine or build_engine(policy, process, tokenizer, settings.batch_size)
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
    return lambda: evaluation.run(engine, process)
