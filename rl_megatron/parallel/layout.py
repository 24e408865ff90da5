"""The layout of a job: parallel degrees, and what they make of a world of ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Parallel degrees of a job. world size = tensor * pipeline * context * data.

    Attributes:
        tensor, pipeline, context, expert, data: Degrees. Those that share experts are `expert`
            of the context- and data-parallel ranks.
        virtual: Model chunks per pipeline stage (virtual pipeline), 1 = off.
        sequence_parallel: Activations between tensor-parallel blocks are split over the sequence.
        first_stage_layers, last_stage_layers: Layers of an uneven first or last stage.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    sequence_parallel: bool = False
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def row_multiple(self) -> int:
        """What the tokens of a forward pass on one context rank must divide by."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def token_multiple(self) -> int:
        """What the tokens of a micro-batch must divide by (a tail of dummy tokens is added)."""
        return self.row_multiple * (2 * self.context if self.context > 1 else 1)

    def tail(self, num_tokens: int) -> int:
        """Dummy tokens added to a micro-batch of so many tokens; one of none gets some too."""
        return -num_tokens % self.token_multiple if num_tokens else self.token_multiple

    @property
    def micro_batch_multiple(self) -> int:
        """What the number of micro-batches must divide by (empty ones are added)."""
        return self.pipeline if self.virtual > 1 else 1

    def describe(self) -> str:
        """One line, for the run's header: "tensor 2 (sequence parallel) x pipeline 2 x data 1"."""
        tensor = f"tensor {self.tensor}" + (" (sequence parallel)" * self.sequence_parallel)
        pipeline = f"pipeline {self.pipeline}" + (
            f" ({self.virtual} chunks each)" if self.virtual > 1 else ""
        )
        expert = f" (expert {self.expert})" * (self.expert > 1)
        return f"{tensor} x {pipeline} x context {self.context} x data {self.data}{expert}"
