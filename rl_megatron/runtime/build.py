"""From a configuration to objects: models, engines, data. Everything that can be wrong is found
here, before the first step."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_megatron.checkpoint.folders import ModelFolder, resolve_model_folder
from rl_megatron.checkpoint.hf_files import read_records
from rl_megatron.config.layout import check_model_fits, check_world_size
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.preference_runs import ReferencedRun
from rl_megatron.config.runs import GRPORun, RunBase
from rl_megatron.data.packing import MicroBatching
from rl_megatron.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from rl_megatron.errors import CheckpointError, ConfigError
from rl_megatron.interfaces.protocols import PolicyBackend, RolloutEngine, Scorer
from rl_megatron.models.families import read_shape, weight_rules
from rl_megatron.models.outline import read_outline
from rl_megatron.models.shape import ModelOutline, ModelShape
from rl_megatron.parallel import process as processes
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process, start_data_parallel, start_megatron

if TYPE_CHECKING:
    from rl_megatron.models.gpt import PolicyModel

logger = logging.getLogger(__name__)

_COLLECTIVE_PATIENCE = 1.5
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_layout(parallel: ParallelConfig, world_size: int) -> Layout:
    """The layout that a configuration asks for on `world_size` ranks."""
    return Layout(
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        virtual=parallel.virtual_pipeline_model_parallel_size or 1,
        context=parallel.context_parallel_size,
        expert=parallel.expert_model_parallel_size,
        data=parallel.data_parallel_size(world_size),
        sequence_parallel=parallel.sequence_parallel,
        first_stage_layers=parallel.num_layers_in_first_pipeline_stage,
        last_stage_layers=parallel.num_layers_in_last_pipeline_stage,
    )


def check_shape_fits(parallel: ParallelConfig, shape: ModelShape) -> None:
    """Refuse a layout that cannot hold the model; see `check_model_fits`."""
    experts = shape.experts
    check_model_fits(
        parallel,
        num_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        intermediate_size=experts.intermediate_size if experts else shape.intermediate_size,
        num_experts=experts.num_experts if experts else None,
    )


def check_balance_fits(moe_aux_loss_coeff: float, shape: ModelShape) -> None:
    """Raises ConfigError where a balance loss is asked of a model without experts."""
    if moe_aux_loss_coeff and shape.experts is None:
        raise ConfigError(
            f"model.moe_aux_loss_coeff = {moe_aux_loss_coeff}: the model has no experts to balance "
            f"(model_type {shape.family}); remove this key or take a model with experts"
        )


def start_process(run: RunBase, world_size: int) -> Process:
    """Join the job in the layout of the run."""
    check_world_size(run.parallel, world_size, run.cluster)
    if run.backend == "torch" and world_size > 1:
        raise ConfigError(
            f"backend = 'torch': runs in one process, and {world_size} were launched; start it "
            "with python instead of torchrun, or take another backend"
        )
    # The watchdog speaks before a collective gives up: it knows where every rank stands.
    patience = _COLLECTIVE_PATIENCE * run.cluster.timeout_minutes
    if run.backend != "megatron":
        return start_data_parallel(patience)
    return start_megatron(make_layout(run.parallel, world_size), run.seed, patience)


def build_bare_model(
    shape: ModelShape, parallel: ParallelConfig, dtype: torch.dtype, vocab_divisor: int
) -> tuple[Process, list[PolicyModel]]:
    """Join the job in a layout, with this rank's part of a model whose weights are not yet set."""
    world_size = processes.world_size_from_environment()
    check_world_size(parallel, world_size)
    check_shape_fits(parallel, shape)
    process = start_megatron(make_layout(parallel, world_size), seed=0)
    # Importing Megatron takes seconds; mistakes are found before.
    from rl_megatron.models.gpt import build_model

    return process, build_model(shape, process, dtype, vocab_divisor)


def build_tokenizer(run: RunBase) -> Tokenizer:
    """The tokenizer of the run, checked against the model's vocabulary."""
    folder = resolve_model_folder(Path(run.model.path))
    tokenizer = load_tokenizer(run.model.tokenizer_path or folder.hf, run.model.chat_template)
    check_vocabulary(tokenizer, describe_model(folder.hf, run.backend).vocab_size)
    return tokenizer


def build_policy(
    run: RunBase,
    process: Process,
    micro_batching: MicroBatching,
    path: str | None = None,
    temperature: float = 1.0,
    trained: bool = True,
) -> PolicyBackend:
    """The model at `path` (default: `model.path`), ready to score and, if `trained`, to step."""
    setting = "reference.path" if path not in (None, run.model.path) else "model.path"
    source = open_model(path or run.model.path, setting, run.backend)
    if source.shape.scalar_head:
        raise CheckpointError(
            f"{source.named} is a reward model, which has scores and no log-probs; name a language "
            "model, such as the one that it was trained from"
        )
    return build_backend(run, process, micro_batching, source, temperature, trained)


@dataclass(frozen=True)
class ModelSource:
    """A model to be built.

    Attributes:
        folder: Where its weights are.
        shape: Its numbers, as far as the backend asks for them.
        named: The setting that names it, and its value.
        setting: The setting.
        head: A scalar head in place of its own.
    """

    folder: ModelFolder
    shape: ModelShape | ModelOutline
    named: str
    setting: str
    head: Tensor | None = None


def open_model(path: str, setting: str, backend: str) -> ModelSource:
    """What lies at a path, given as `setting`, for a backend."""
    folder = resolve_model_folder(Path(path), setting)
    shape = describe_model(folder.hf, backend)
    return ModelSource(folder, shape, f"{setting} {path}", setting)


def describe_model(hf_folder: Path, backend: str) -> ModelShape | ModelOutline:
    """The numbers of a model: Megatron builds it from them, the others take what transformers
    builds."""
    return read_shape(hf_folder) if backend == "megatron" else read_outline(hf_folder)


def build_backend(
    run: RunBase,
    process: Process,
    micro_batching: MicroBatching,
    source: ModelSource,
    temperature: float,
    trained: bool,
) -> Any:
    """The run's backend on a model: a `PolicyBackend`; with a scalar head a `RewardBackend`."""
    if run.backend != "megatron":
        return _build_transformers(run, process, micro_batching, source, temperature, trained)
    return _build_megatron(run, process, micro_batching, source, temperature, trained)


def _build_transformers(
    run: RunBase,
    process: Process,
    micro_batching: MicroBatching,
    source: ModelSource,
    temperature: float,
    trained: bool,
) -> Any:
    if source.folder.megatron is not None:
        raise CheckpointError(
            f"{source.named} is a Megatron checkpoint, and backend {run.backend} reads Hugging "
            "Face folders only; set backend=megatron, or make a folder of it with "
            "tools/convert_checkpoint.py export"
        )
    # Names a file that is missing or cut; transformers may not.
    read_records(source.folder.hf)
    settings: dict[str, Any] = {
        "temperature": temperature,
        "dtype": _DTYPES[run.model.dtype],
        "optimizer": run.optimizer if trained else None,
        "head_kernels": run.kernels.linear_logprob,
        "one_pass": run.kernels.one_pass,
        "head": source.head,
        "recompute": run.model.recompute,
    }
    if run.backend == "torch":
        from rl_megatron.backends.torch import TorchBackend

        return TorchBackend(source.folder.hf, process, micro_batching, **settings)
    from rl_megatron.backends.deepspeed import open_deepspeed

    return open_deepspeed(source.folder.hf, process, micro_batching, run.deepspeed, **settings)


def _build_megatron(
    run: RunBase,
    process: Process,
    micro_batching: MicroBatching,
    source: ModelSource,
    temperature: float,
    trained: bool,
) -> Any:
    folder, shape = source.folder, source.shape
    assert isinstance(shape, ModelShape)
    check_shape_fits(run.parallel, shape)
    check_balance_fits(run.model.moe_aux_loss_coeff if trained else 0.0, shape)
    # Importing Megatron takes seconds; mistakes are found before.
    from rl_megatron.backends.megatron import MegatronBackend
    from rl_megatron.checkpoint.hf_load import load_hf_weights
    from rl_megatron.checkpoint.megatron import load_megatron
    from rl_megatron.models.gpt import build_model

    divisor = run.model.make_vocab_size_divisible_by
    chunks = build_model(
        shape,
        process,
        _DTYPES[run.model.dtype],
        divisor,
        temperature,
        run.model.recompute,
        run.kernels.linear_logprob,
    )
    rules = weight_rules(shape, divisor)
    if folder.megatron is None:
        load_hf_weights(chunks, rules, folder.hf, process, head=source.head)
    else:
        load_megatron(folder.megatron, chunks, head=source.head)
    logger.info("%s: %s parameters from %s", shape.family, f"{_size(shape):,}", folder.hf)
    return MegatronBackend(
        chunks,
        rules,
        process,
        micro_batching,
        optimizer=run.optimizer if trained else None,
        distributed_optimizer=run.parallel.use_distributed_optimizer,
        one_pass=run.kernels.one_pass,
        moe_aux_loss_coeff=run.model.moe_aux_loss_coeff,
    )


def build_reference(
    run: ReferencedRun | GRPORun,
    process: Process,
    micro_batching: MicroBatching,
    policy: PolicyBackend,
    temperature: float = 1.0,
) -> Scorer:
    """The frozen model that the policy is compared with. Call it before the first step."""
    if run.reference.placement == "swapped":
        return waiting_reference(run, process, micro_batching, policy, temperature)
    path = run.reference.path or run.model.path
    return build_policy(run, process, micro_batching, path, temperature, trained=False)


def waiting_reference(
    run: ReferencedRun | GRPORun,
    process: Process,
    micro_batching: MicroBatching,
    policy: PolicyBackend,
    temperature: float = 1.0,
) -> Scorer:
    """The same, with its weights in host memory; they come to the device, and with Megatron take
    the policy's place there, while they are needed."""
    path = run.reference.path or run.model.path
    held: Any = policy
    if run.backend != "megatron":
        from rl_megatron.backends.transformers_backend import WaitingReference

        held = build_policy(run, process, micro_batching, path, temperature, trained=False)
        return WaitingReference(held)
    from rl_megatron.backends.megatron import SwappedReference

    if path == run.model.path:
        return SwappedReference(held, held)
    source: Any = build_policy(run, process, micro_batching, path, temperature, trained=False)
    return SwappedReference(held, source)


def build_engine(
    policy: PolicyBackend, process: Process, tokenizer: Tokenizer, max_concurrent_sequences: int
) -> RolloutEngine:
    """The engine that samples from the policy's own weights."""
    from rl_megatron.backends.transformers_backend import TransformersBackend

    if isinstance(policy, TransformersBackend):
        from rl_megatron.rollout.hf import HFEngine

        model, owns_model = policy.model_to_sample_from()
        return HFEngine(model, process, tokenizer.decode, max_concurrent_sequences, owns_model)
    from rl_megatron.backends.megatron import MegatronBackend
    from rl_megatron.rollout.megatron import MegatronEngine

    assert isinstance(policy, MegatronBackend), f"no engine samples from {type(policy).__name__}"
    return MegatronEngine(policy.chunks, process, tokenizer.decode, max_concurrent_sequences)


def _size(shape: ModelShape) -> int:
    """Parameters of the whole model, padding not counted."""
    rules = weight_rules(shape)
    return sum(
        math.prod(size) for rule in rules if not rule.is_copy for size in rule.split.hf_shapes
    )
