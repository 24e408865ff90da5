"""Sampling on the trainer's own Megatron weights: no second copy, no conversion, any layout.

Every data-parallel replica samples its share of the requests; within a replica all ranks walk
through the same steps. Replicas that share experts make as many forward passes as the longest of
them, some on dummy tokens. The key-value cache lives in our core attention (models/sequence.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.interfaces.records import Prompt, Rollout, Sampling
from rl_megatron.models.gpt import PolicyModel
from rl_megatron.models.sequence import (
    KeyValueCache,
    SequenceContext,
    decode_context,
    packed_context,
    prefill_context,
)
from rl_megatron.parallel import watchdog
from rl_megatron.parallel.inference import inference_mode
from rl_megatron.parallel.process import Process
from rl_megatron.rollout.requests import Request, gather_shares, make_requests, share_of, to_rollout
from rl_megatron.rollout.sampling import sample
from rl_megatron.rollout.seeds import uniforms

_PREFILL_TOKENS = 8192


class MegatronEngine:
    """The `RolloutEngine` protocol on the chunks of a `MegatronBackend`.

    Args:
        chunks: This rank's part of the policy; read at every step, so always up to date.
        process: Where this rank stands.
        decode: Text of token ids, special tokens left out.
        max_concurrent_sequences: Responses that one replica samples at once.
    """

    def __init__(
        self,
        chunks: list[PolicyModel],
        process: Process,
        decode: Callable[[list[int]], str],
        max_concurrent_sequences: int,
    ) -> None:
        self._chunks = chunks
        self._process = process
        self._decode = decode
        self._max_concurrent = max_concurrent_sequences
        self._policy_version = 0

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, group_size: int, seed: int
    ) -> list[Rollout]:
        """`group_size` rollouts of each prompt, equal on all ranks; see `RolloutEngine`."""
        requests = make_requests(prompts, group_size, seed)
        mine = share_of(requests, self._process)
        modes = [chunk.training for chunk in self._chunks]
        for chunk in self._chunks:
            chunk.eval()
        with inference_mode():
            for start in range(0, self._process.expert_maximum(len(mine)), self._max_concurrent):
                wave = mine[start : start + self._max_concurrent]
                # What a replica without requests samples for the others' sake is dropped.
                idle = replace(requests[0], response_ids=[], logprobs=[], finished=None)
                self._run_wave(wave or [idle], sampling)
        for chunk, mode in zip(self._chunks, modes, strict=True):
            chunk.train(mode)
        everyones = gather_shares(mine, self._process)
        return [to_rollout(r, self._decode, self._policy_version) for r in everyones]

    def logits(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Logits [tokens, vocabulary] fp32 at every place of the sequences, end to end.

        For checks: a model is never trained through them. Equal on all ranks; every replica
        computes all of it.
        """
        tokens, bounds = self._end_to_end(sequences)
        size = sum(len(sequence) for sequence in sequences)
        with inference_mode():
            context = packed_context(bounds, self._inverse_frequencies, self._process.device)
            hidden = self._forward(tokens, context)
            shape = (size, self._chunks[0].shape.vocab_size)
            result = torch.zeros(shape, device=self._process.device)
            head = self._head()
            if hidden is not None and head is not None:
                result = self._logits(hidden[:size], head)
            return self._from_last_stage(result.contiguous())

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], policy_version: int) -> None:
        """Note the version: the weights are the trainer's own, and nothing is kept between calls.

        `weights` is not read.
        """
        del weights
        self._policy_version = policy_version

    def sleep(self) -> None:
        """Nothing to give back: the cache lives only as long as a call of `generate`."""

    def wake(self) -> None:
        """Nothing to take back."""

    def close(self) -> None:
        """Let go of the policy."""
        self._chunks = []

    def _run_wave(self, wave: list[Request], sampling: Sampling) -> None:
        """Sample all responses of a wave to their ends."""
        head = self._head()
        prompts, prompt_of = _unique_prompts(wave)
        cache, hidden = self._prefill(prompts, sampling.max_response_tokens)
        active = wave
        rows = self._padded(torch.tensor(prompt_of))
        cache.keep(rows)
        hidden = None if hidden is None else hidden[rows.to(hidden.device)]
        while True:
            watchdog.beat()
            tokens = self._next_tokens(hidden, head, active, sampling)
            running = [i for i, request in enumerate(active) if request.finished is None]
            if not self._process.expert_maximum(len(running)):
                return
            running = running or [0]  # Finished, but replicas that share its experts are not.
            if len(running) < len(active):
                rows = self._padded(torch.tensor(running))
                cache.keep(rows)
                tokens = tokens[rows]
                active = [active[i] for i in running]
            hidden = self._decode_step(tokens, cache)

    def _prefill(
        self, prompts: list[Prompt], max_response_tokens: int
    ) -> tuple[KeyValueCache, Tensor | None]:
        """A cache with one row per prompt, and (last stage) the hidden state after each prompt."""
        process = self._process
        multiple = process.layout.row_multiple
        longest = max(len(prompt.token_ids) for prompt in prompts)
        size = max(longest + max_response_tokens, multiple)
        # One row more for the tail of dummy tokens that lets the layout divide.
        cache = KeyValueCache(len(prompts) + 1, size, process.device)
        last = []
        slices = list(_by_tokens(prompts, _PREFILL_TOKENS))
        idle_passes = process.expert_maximum(len(slices)) - len(slices)
        for first, group in slices:
            tokens, bounds = self._end_to_end([prompt.token_ids for prompt in group])
            context = prefill_context(bounds, self._inverse_frequencies, cache, first)
            hidden = self._forward(tokens, context)
            if hidden is not None:
                ends = bounds[1 : len(group) + 1] - 1
                last.append(hidden[ends.to(hidden.device)])
        for _ in range(idle_passes):
            bounds = torch.tensor([0, multiple])
            context = packed_context(bounds, self._inverse_frequencies, process.device)
            self._forward(torch.zeros(multiple, dtype=torch.int64), context)
        return cache, torch.cat(last) if last else None

    def _end_to_end(self, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Tokens and boundaries of the sequences; a tail of dummy tokens lets the layout divide."""
        ids = [token for sequence in sequences for token in sequence]
        sizes = [len(sequence) for sequence in sequences]
        tail = -len(ids) % self._process.layout.row_multiple
        if tail:
            ids, sizes = ids + [0] * tail, [*sizes, tail]
        return torch.tensor(ids), torch.tensor([0, *sizes]).cumsum(0)

    def _decode_step(self, tokens: Tensor, cache: KeyValueCache) -> Tensor | None:
        """Append one token to every row of the cache; (last stage) the hidden states after it."""
        context = decode_context(self._inverse_frequencies, cache)
        hidden = self._forward(tokens, context)
        cache.lengths += 1
        return hidden

    def _next_tokens(
        self,
        hidden: Tensor | None,
        head: Tensor | None,
        active: list[Request],
        sampling: Sampling,
    ) -> Tensor:
        """Sample a token for every active request and give it to the request; [rows] on the host.

        The last stage samples (all its tensor-parallel ranks alike, from the same logits) and
        tells the others.
        """
        rows = len(self._padded(torch.arange(len(active))))
        drawn = torch.zeros(2, rows, dtype=torch.float64, device=self._process.device)
        if hidden is not None and head is not None:
            counts = [len(request.response_ids) for request in active]
            numbers = uniforms([request.key for request in active], counts)
            logits = self._logits(hidden[: len(active)], head)
            sampled = torch.tensor(counts, device=logits.device)
            tokens, logprobs = sample(logits, sampling, sampled, numbers)
            drawn[0, : len(active)] = tokens.double()
            drawn[1, : len(active)] = logprobs.double()
        drawn = self._from_last_stage(drawn)
        token_ids, values = drawn[0].long().tolist(), drawn[1].tolist()
        for request, token, logprob in zip(active, token_ids, values, strict=False):
            if request.finished is None:
                request.take(token, logprob, sampling)
        return torch.tensor(token_ids)

    def _from_last_stage(self, tensor: Tensor) -> Tensor:
        """The last stage's tensor, on every stage."""
        if self._process.layout.pipeline > 1:
            group = self._process.pipeline_group
            last = dist.get_global_rank(group, self._process.layout.pipeline - 1)
            dist.broadcast(tensor, src=last, group=group)
        return tensor

    def _head(self) -> Tensor | None:
        """This rank's valid rows of the head in fp32, on the last stage."""
        if not self._process.is_last_stage:
            return None
        model = self._chunks[-1]
        weight = model.head_weight()
        first = self._process.tensor_rank * weight.shape[0]
        valid = max(0, min(weight.shape[0], model.shape.vocab_size - first))
        padded = torch.zeros_like(weight, dtype=torch.float32)
        padded[:valid] = weight[:valid]
        return padded

    def _logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """[n, vocabulary] fp32, equal on all tensor-parallel ranks."""
        local = hidden.float() @ head.t()
        size = self._process.layout.tensor
        if size == 1:
            return local[:, : self._chunks[-1].shape.vocab_size]
        shards = local.new_empty(size, *local.shape)
        dist.all_gather_into_tensor(
            shards.flatten(0, 1), local.contiguous(), group=self._process.tensor_group
        )
        whole = shards.transpose(0, 1).flatten(1)
        return whole[:, : self._chunks[-1].shape.vocab_size]

    def _forward(self, tokens: Tensor, context: SequenceContext) -> Tensor | None:
        """Hidden states [T, H] after the last layer on the last stage, None elsewhere.

        Walks through the chunks in pipeline order: chunk v of all stages, then chunk v + 1.
        """
        process, layout = self._process, self._process.layout
        ids = tokens[None].to(process.device)
        rows = len(tokens) // layout.row_multiple
        hidden: Tensor | None = None
        for chunk in self._chunks:
            if not chunk.pre_process:
                shape = (rows, 1, chunk.config.hidden_size)
                received = torch.empty(
                    shape, dtype=chunk.config.params_dtype, device=process.device
                )
                dist.recv(received, src=self._neighbour(-1), group=process.pipeline_group)
                chunk.set_input_tensor(received)
            hidden = chunk(ids, context)
            if not chunk.post_process:
                dist.send(
                    hidden.contiguous(), dst=self._neighbour(+1), group=process.pipeline_group
                )
        if not process.is_last_stage:
            return None
        assert hidden is not None
        hidden = hidden[:, 0]
        if layout.sequence_parallel:
            whole = hidden.new_empty(len(tokens), hidden.shape[1])
            dist.all_gather_into_tensor(whole, hidden.contiguous(), group=process.tensor_group)
            return whole
        return hidden

    def _neighbour(self, step: int) -> int:
        """Global rank of the next (+1) or previous (-1) stage; the last one is followed by 0."""
        stage = (self._process.stage + step) % self._process.layout.pipeline
        return dist.get_global_rank(self._process.pipeline_group, stage)

    def _padded(self, rows: Tensor) -> Tensor:
        """`rows` with the last repeated until the layout divides their number."""
        tail = -len(rows) % self._process.layout.row_multiple
        return torch.cat([rows, rows[-1:].expand(tail)])

    @property
    def _inverse_frequencies(self) -> Tensor:
        return self._chunks[0].inverse_frequencies


def _unique_prompts(wave: list[Request]) -> tuple[list[Prompt], list[int]]:
    """Each prompt once, and which of them each request has: a prompt is read once per wave."""
    place: dict[tuple[int, ...], int] = {}
    prompts: list[Prompt] = []
    prompt_of = []
    for request in wave:
        ids = request.prompt.token_ids
        if ids not in place:
            place[ids] = len(prompts)
            prompts.append(request.prompt)
        prompt_of.append(place[ids])
    return prompts, prompt_of


def _by_tokens(prompts: list[Prompt], budget: int) -> Iterator[tuple[int, list[Prompt]]]:
    """(index of the first, prompts) in slices of at most `budget` tokens, one prompt at least."""
    first = 0
    while first < len(prompts):
        end, tokens = first, 0
        while end < len(prompts) and (
            end == first or tokens + len(prompts[end].token_ids) <= budget
        ):
            tokens += len(prompts[end].token_ids)
            end += 1
        yield first, prompts[first:end]
        first = end
