"""One process of a job: its rank, device and process groups."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_megatron.errors import RLMegatronError
from rl_megatron.parallel import cpu_runtime, watchdog
from rl_megatron.parallel.layout import Layout

T = TypeVar("T")


@dataclass(frozen=True)
class Process:
    """Where this process stands in the job. Made by one of the functions below.

    Attributes:
        layout: Parallel degrees of the job.
        rank: Global rank.
        device: The device that this rank computes on.
        tensor_group, pipeline_group, context_group, data_group: The groups this rank belongs to;
            the pipeline group's ranks are in stage order. None in a job without Megatron.
        replica_group: Data- and context-parallel ranks together: each holds the same weights,
            experts excepted.
        expert_group: Ranks that share the experts of each layer, in the order of the experts.
    """

    layout: Layout
    rank: int
    device: torch.device
    tensor_group: ProcessGroup | None = None
    pipeline_group: ProcessGroup | None = None
    context_group: ProcessGroup | None = None
    data_group: ProcessGroup | None = None
    replica_group: ProcessGroup | None = None
    expert_group: ProcessGroup | None = None

    @property
    def tensor_rank(self) -> int:
        """Rank within the tensor-parallel group."""
        return 0 if self.tensor_group is None else dist.get_rank(self.tensor_group)

    @property
    def stage(self) -> int:
        """Pipeline stage."""
        return 0 if self.pipeline_group is None else dist.get_rank(self.pipeline_group)

    @property
    def context_rank(self) -> int:
        """Rank within the context-parallel group."""
        return 0 if self.context_group is None else dist.get_rank(self.context_group)

    @property
    def replica_rank(self) -> int:
        """Rank among those that hold the same weights."""
        return 0 if self.replica_group is None else dist.get_rank(self.replica_group)

    @property
    def num_replicas(self) -> int:
        """Ranks that can sample on their own: context-parallel ones hold all weights too."""
        return self.layout.data * self.layout.context

    @property
    def data_rank(self) -> int:
        """Rank within the data-parallel group."""
        return 0 if self.data_group is None else dist.get_rank(self.data_group)

    @property
    def expert_rank(self) -> int:
        """Rank within the expert-parallel group."""
        return 0 if self.expert_group is None else dist.get_rank(self.expert_group)

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the head."""
        return self.stage == self.layout.pipeline - 1

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and speaks to the terminal."""
        return self.rank == 0

    def all_reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce `value` in place over all ranks, on this rank's device; returned on the host."""
        watchdog.beat()
        if self.layout.world_size == 1:
            return value
        moved = value.to(self.device)
        dist.all_reduce(moved, op=op)
        return moved.cpu()

    def expert_maximum(self, value: int) -> int:
        """The largest `value` among the ranks that share experts.

        A forward pass of one is a forward pass of all: they agree on their number by this.
        """
        if self.layout.expert == 1:
            return value
        largest = torch.tensor(value, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.expert_group)
        return int(largest)

    def gather(self, value: T) -> list[T]:
        """What every rank gives, by rank, on all ranks; any picklable object."""
        watchdog.beat()
        if self.layout.world_size == 1:
            return [value]
        values: list[T] = [value] * self.layout.world_size
        dist.all_gather_object(values, value)
        return values

    def from_main(self, ask: Callable[[], T]) -> T:
        """What `ask` gives on the main rank, on all ranks; elsewhere it is not called.

        What is on disk may change between the looks of two ranks, so one looks and tells. An error
        of ours is raised on all ranks.
        """
        answer: T | None = None
        error: RLMegatronError | None = None
        if self.is_main:
            try:
                answer = ask()
            except RLMegatronError as raised:
                error = raised
        told, failed = self.gather((answer, error))[0]
        if failed is not None:
            raise failed
        return cast(T, told)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.layout.world_size > 1:
            dist.barrier()
        watchdog.beat()


def pick_device() -> torch.device:
    """The CUDA device of this local rank, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def world_size_from_environment() -> int:
    """WORLD_SIZE as set by torchrun or the SLURM scripts; 1 without them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _join(device: torch.device, timeout_minutes: float) -> None:
    """Initialise torch.distributed once, also for a single process without a launcher."""
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    if "MASTER_ADDR" in os.environ and "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def start_data_parallel(timeout_minutes: float = 30.0) -> Process:
    """Join the job as one of ranks that each run a whole model, without Megatron."""
    device = pick_device()
    _join(device, timeout_minutes)
    everyone = dist.group.WORLD
    return Process(
        layout=Layout(data=dist.get_world_size()),
        rank=dist.get_rank(),
        device=device,
        data_group=everyone,
        replica_group=everyone,
    )


def start_megatron(layout: Layout, seed: int, timeout_minutes: float = 30.0) -> Process:
    """Join the job and build Megatron's process groups for `layout`.

    May be called again with another layout of the same world size: the old groups are dropped.
    """
    # Megatron overlaps tensor-parallel communication only if kernels start in program order.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cpu_runtime.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    device = pick_device()
    _join(device, timeout_minutes)
    world_size = dist.get_world_size()
    assert layout.world_size == world_size, f"{layout} on {world_size} ranks"
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        _destroy_megatron_groups()
    others = _groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        distributed_timeout_minutes=timeout_minutes,
    )
    _megatron_groups.update(_groups() - others)
    model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    return Process(
        layout=layout,
        rank=dist.get_rank(),
        device=device,
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
        context_group=parallel_state.get_context_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(),
        replica_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        expert_group=parallel_state.get_expert_model_parallel_group(),
    )


# Made for the layout of now.
_megatron_groups: set[ProcessGroup] = set()


def _groups() -> set[ProcessGroup]:
    return set(dist.distributed_c10d._world.pg_map)


def _destroy_megatron_groups() -> None:
    """End them; Megatron only forgets them, and each keeps its threads. Others stay: DeepSpeed's,
    for one, which it makes once."""
    # Models of the earlier layout refer to its groups and, in circles, to themselves.
    gc.collect()
    for group in _groups() & _megatron_groups:
        dist.destroy_process_group(group)
    _megatron_groups.clear()


def stop() -> None:
    """Leave the job. Only for a rank that ends well: a failing rank just exits."""
    if dist.is_initialized():
        dist.destroy_process_group()
