"""Sampling on a transformers model that every rank holds whole, with our own loop and rules.

transformers' `generate` is not used: it fills in what generation_config.json of the model folder
says (repetition penalties, top_k), and its random numbers depend on the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rl_megatron.errors import ConfigError
from rl_megatron.interfaces.records import Prompt, Rollout, Sampling
from rl_megatron.models.self_check import largest_rounding
from rl_megatron.models.transformers_bare import give_memory_back, take_memory
from rl_megatron.models.transformers_head import LogprobHead, trunk
from rl_megatron.models.transformers_model import set_weights
from rl_megatron.parallel import watchdog
from rl_megatron.parallel.process import Process
from rl_megatron.rollout.requests import Request, gather_shares, make_requests, share_of, to_rollout
from rl_megatron.rollout.sampling import sample
from rl_megatron.rollout.seeds import uniforms


class HFEngine:
    """The `RolloutEngine` protocol on a transformers model, whole on every rank.

    Args:
        model: The trainer's, read at every step; or of the engine's own, from
            `bare_transformers_model`.
        process: This process; ranks differ in their requests only.
        decode: Text of token ids, special tokens left out.
        max_concurrent_sequences: Responses that one rank samples side by side.
        owns_model: The model is the engine's own: it has weights from `load_weights` to `sleep`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        process: Process,
        decode: Callable[[list[int]], str],
        max_concurrent_sequences: int,
        owns_model: bool = False,
    ) -> None:
        assert process.num_replicas == process.layout.world_size, "the hf engine cuts no model"
        self._model = model.eval()
        self._head = LogprobHead(model)
        self._accepted = inspect.signature(trunk(model).forward).parameters
        self._cache_name = _cache_name(self._accepted, model.config.model_type)
        self._owns_model = owns_model
        self._process = process
        self._decode = decode
        self._max_concurrent = max_concurrent_sequences
        self._device = process.device
        self._policy_version = 0
        self._is_checked = False
        if not owns_model:
            self._check_cache()

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, group_size: int, seed: int
    ) -> list[Rollout]:
        """`group_size` rollouts of each prompt, equal on all ranks; see `RolloutEngine`."""
        mine = share_of(make_requests(prompts, group_size, seed), self._process)
        for start in range(0, len(mine), self._max_concurrent):
            self._run_wave(mine[start : start + self._max_concurrent], sampling)
        everyones = gather_shares(mine, self._process)
        return [to_rollout(r, self._decode, self._policy_version) for r in everyones]

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], policy_version: int) -> None:
        """Copy the weights in, or only note the version, if the model is the trainer's."""
        if self._owns_model:
            set_weights(self._model, weights)
            self._check_cache()
        self._policy_version = policy_version

    def sleep(self) -> None:
        """Give back the memory of weights of its own; the cache ends with a call of `generate`."""
        if self._owns_model:
            give_memory_back(self._model)

    def wake(self) -> None:
        """Take memory for weights of its own, which `load_weights` then fills."""
        if self._owns_model:
            take_memory(self._model)

    def close(self) -> None:
        """Let go of the model."""
        del self._model, self._head

    @torch.inference_mode()
    def _check_cache(self) -> None:
        """Refuse, once, a model whose log-probs with a cache are not those of whole sequences."""
        if self._is_checked:
            return
        prompts = [Prompt(size, tuple(range(3, 3 + size)), "") for size in (9, 4)]
        sampling = Sampling(temperature=1.0, max_response_tokens=4, stop_token_ids=())
        wave = make_requests(prompts, 1, seed=0)
        self._run_wave(wave, sampling)
        limit = largest_rounding(self._model.dtype)
        for request in wave:
            ids = torch.tensor([*request.prompt.token_ids, *request.response_ids])
            hidden = trunk(self._model)(ids[None].to(self._device), use_cache=False)
            rows = self._head.logits()(hidden.last_hidden_state[0, -5:-1]).log_softmax(1).cpu()
            expected = rows.gather(1, ids[-4:, None])[:, 0]
            if (expected - torch.tensor(request.logprobs)).abs().mean() > limit:
                raise ConfigError(
                    f"rollout.engine = 'hf': model_type {self._model.config.model_type} has other "
                    "log-probs with transformers' cache than without; use another model"
                )
        self._is_checked = True

    def _run_wave(self, wave: list[Request], sampling: Sampling) -> None:
        """Sample all responses of a wave to their ends."""
        # float32, as in the log-probs of training: bf16 logits are off by several percent.
        logits = self._head.logits()
        cache = DynamicCache(config=self._model.config)
        active = wave
        mask, hidden = self._read_prompts(wave, cache)
        while True:
            watchdog.beat()
            tokens = _next_tokens(logits(hidden), active, sampling)
            running = [i for i, request in enumerate(active) if request.finished is None]
            if not running:
                return
            if len(running) < len(active):
                active = [active[i] for i in running]
                rows = torch.tensor(running, device=self._device)
                tokens, mask = tokens[rows], mask[rows]
                cache.reorder_cache(rows)
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            hidden = self._forward(tokens[:, None], mask, cache)

    def _read_prompts(self, wave: list[Request], cache: DynamicCache) -> tuple[Tensor, Tensor]:
        """Fill the cache, one row per request; the mask [n, S] and the last hidden states [n, H].

        Prompts stand right-aligned, so that all responses begin in one column. A prompt that
        several requests share is read once.
        """
        prompts = list(dict.fromkeys(request.prompt.token_ids for request in wave))
        longest = max(len(prompt) for prompt in prompts)
        tokens = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        tokens, mask = tokens.to(self._device), mask.to(self._device)
        hidden = self._forward(tokens, mask, cache)
        place = {prompt: row for row, prompt in enumerate(prompts)}
        rows = torch.tensor([place[r.prompt.token_ids] for r in wave], device=self._device)
        cache.reorder_cache(rows)
        return mask[rows], hidden[rows]

    def _forward(self, tokens: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Append tokens [n, L] to the cache; hidden states [n, H] fp32 after the last of them.

        `mask` [n, S] is 1 on real tokens, those in the cache included; positions count only these.
        """
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        more = {"position_ids": positions} if "position_ids" in self._accepted else {}
        more[self._cache_name] = cache
        output = trunk(self._model)(tokens, attention_mask=mask, use_cache=True, **more)
        hidden: Tensor = output.last_hidden_state[:, -1].float()
        return hidden


def _cache_name(accepted: Collection[str], model_type: str) -> str:
    """What a model calls the cache: releases of transformers differ."""
    for name in ("cache", "past_key_values"):
        if name in accepted:
            return name
    raise ConfigError(
        f"rollout.engine = 'hf': model_type {model_type} has a state of its own in place of "
        "transformers' cache, and cannot be sampled from; use another model"
    )


def _next_tokens(logits: Tensor, active: list[Request], sampling: Sampling) -> Tensor:
    """Sample a token [n] for every active request and give it to the request."""
    counts = [len(request.response_ids) for request in active]
    numbers = uniforms([request.key for request in active], counts)
    sampled = torch.tensor(counts, device=logits.device)
    tokens, logprobs = sample(logits, sampling, sampled, numbers)
    for request, token, logprob in zip(active, tokens.tolist(), logprobs.tolist(), strict=True):
        request.take(token, logprob, sampling)
    return tokens
