"""How a model is split over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import Field, PositiveFloat, PositiveInt

from rl_megatron.config.base import Idle, Problem, Strict


class ClusterConfig(Strict):
    """The machines of the run."""

    num_nodes: PositiveInt = 1
    """Nodes."""

    gpus_per_node: PositiveInt | None = None
    """Ranks on each node; null: as many as are launched."""

    timeout_minutes: PositiveFloat = 30.0
    """A rank that has not come further for this long ends the job, and says where it stands."""

    @property
    def world_size(self) -> int | None:
        """Ranks of the run, or None where the launcher decides."""
        return None if self.gpus_per_node is None else self.num_nodes * self.gpus_per_node

    def idle(self) -> Mapping[str, Idle]:
        """`num_nodes` where the launcher decides."""
        if self.gpus_per_node is None:
            reason = "cluster.gpus_per_node is null; set it, or remove this key"
            return {"num_nodes": Idle(reason, ("gpus_per_node",))}
        return {}


class ParallelConfig(Strict):
    """Parallel degrees, by Megatron's names. What is left of the ranks is data-parallel."""

    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share each layer."""

    pipeline_model_parallel_size: PositiveInt = 1
    """Stages that the layers are cut into."""

    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=2)
    """Chunks of layers that each stage holds (interleaved schedule); null: one."""

    context_parallel_size: PositiveInt = 1
    """Ranks that share each sequence."""

    expert_model_parallel_size: PositiveInt = 1
    """Ranks that share the experts of each layer, of those that are data- or context-parallel."""

    sequence_parallel: bool = False
    """Share the activations between tensor-parallel regions too."""

    use_distributed_optimizer: bool = True
    """Share the optimizer's state over data-parallel ranks."""

    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first stage, where it is to differ from the others."""

    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last stage, where it is to differ from the others."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model: tensor x pipeline x context."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model on `world_size` ranks; see `layout.check_world_size`."""
        return world_size // self.model_parallel_size

    def problems(self) -> Iterable[Problem]:
        """Degrees that are not supported, or that need another degree."""
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            yield Problem(
                "sequence_parallel",
                True,
                "splits activations over tensor-parallel ranks, and there is only one; raise "
                "parallel.tensor_model_parallel_size or set this to false",
                others=("tensor_model_parallel_size",),
            )
        if self.pipeline_model_parallel_size == 1:
            for name in (
                "virtual_pipeline_model_parallel_size",
                "num_layers_in_first_pipeline_stage",
                "num_layers_in_last_pipeline_stage",
            ):
                if getattr(self, name) is not None:
                    yield Problem(
                        name,
                        getattr(self, name),
                        "needs more than one pipeline stage; raise "
                        "parallel.pipeline_model_parallel_size or remove this key",
                        others=("pipeline_model_parallel_size",),
                    )
