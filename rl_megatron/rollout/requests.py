"""The requests of one call of `generate`, and the rollouts made of their answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from rl_megatron.interfaces.records import Prompt, Rollout, Sampling
from rl_megatron.parallel.process import Process
from rl_megatron.rollout.seeds import stream_key


@dataclass
class Request:
    """One response to be sampled.

    Attributes:
        index: Place of the rollout in the result.
        prompt, sample_index: As in `Rollout`.
        key: Stream of its random numbers.
        response_ids, logprobs: What was sampled so far.
        finished: "stop", "length", or None while it runs.
    """

    index: int
    prompt: Prompt
    sample_index: int
    key: int
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: str | None = None

    def take(self, token: int, logprob: float, sampling: Sampling) -> None:
        """Append a sampled token; the response may end with it."""
        self.response_ids.append(token)
        self.logprobs.append(logprob)
        if token in sampling.stop_token_ids:
            self.finished = "stop"
        elif len(self.response_ids) == sampling.max_response_tokens:
            self.finished = "length"


def make_requests(prompts: Sequence[Prompt], group_size: int, seed: int) -> list[Request]:
    """`group_size` requests per prompt, in order.

    A row that occurs again in one call continues its sample indices, so that its second group is
    another group (sample_index // group_size) with other random numbers.
    """
    seen: Counter[int] = Counter()
    requests = []
    for prompt in prompts:
        first = seen[prompt.row_id]
        seen[prompt.row_id] += group_size
        for sample_index in range(first, first + group_size):
            key = stream_key(seed, prompt.row_id, sample_index)
            requests.append(Request(len(requests), prompt, sample_index, key))
    return requests


def share_of(requests: list[Request], process: Process) -> list[Request]:
    """What this replica samples: one stretch of the requests, which may be empty."""
    size = -(-len(requests) // process.num_replicas)
    return requests[process.replica_rank * size :][:size]


def gather_shares(mine: list[Request], process: Process) -> list[Request]:
    """The requests of all replicas, in order, on all of them. Collective."""
    if process.num_replicas == 1:
        return mine
    shares: list[list[Request]] = [[] for _ in range(process.num_replicas)]
    dist.all_gather_object(shares, mine, group=process.replica_group)
    return [request for share in shares for request in share]


def to_rollout(
    request: Request, decode: Callable[[list[int]], str], policy_version: int
) -> Rollout:
    """The finished request as a rollout."""
    assert request.finished is not None
    return Rollout(
        prompt=request.prompt,
        sample_index=request.sample_index,
        response_ids=tuple(request.response_ids),
        rollout_logprobs=tuple(request.logprobs),
        finish_reason="stop" if request.finished == "stop" else "length",
        text=decode(request.response_ids),
        policy_version=policy_version,
    )
