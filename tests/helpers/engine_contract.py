"""What every engine must do: one set of checks, run on each of them.

A check takes a setup that makes fresh engines with the weights of one tiny model folder. All ranks
of a job run the same check; assertions hold on each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from rl_megatron.data.packing import pack_rollouts
from rl_megatron.interfaces.protocols import PolicyBackend, RolloutEngine
from rl_megatron.interfaces.records import Prompt, Rollout, Sampling
from rl_megatron.losses import sft_objective
from tests.helpers.backend_contract import CLOSE, TEMPERATURE
from tests.helpers.oracle import next_token_logprobs, oracle_model


@dataclass(frozen=True)
class EngineSetup:
    """How to make an engine under test.

    Attributes:
        folder: Model folder of `make_tiny_hf`, float32.
        make: max_concurrent_sequences to an engine, awake, and the backend (trainable, at
            `TEMPERATURE`) whose weights it samples from.
    """

    folder: Path
    make: Callable[[int], tuple[RolloutEngine, PolicyBackend]]


PROMPTS = [
    Prompt(row_id=5, token_ids=(2, 40, 41), text="a", answer="A"),
    Prompt(row_id=3, token_ids=(2, 7, 8, 9, 10, 11, 12, 13, 14), text="b", answer="B"),
    Prompt(row_id=9, token_ids=(99,), text="c", answer="C"),
    # The text of the first again: another row, so other samples.
    Prompt(row_id=6, token_ids=(2, 40, 41), text="a", answer="D"),
]
STOPS = tuple(range(20, 36))


def make_sampling(temperature: float = TEMPERATURE, **more: object) -> Sampling:
    """Stop tokens that a tiny model samples after a few tokens."""
    values = {"max_response_tokens": 8, "stop_token_ids": STOPS} | more
    return Sampling(temperature=temperature, **values)  # type: ignore[arg-type]


def ids_of(rollouts: Sequence[Rollout]) -> list[tuple[int, ...]]:
    """The sampled tokens of each rollout."""
    return [rollout.response_ids for rollout in rollouts]


def assert_same_rollouts(found: Sequence[Rollout], expected: Sequence[Rollout]) -> None:
    """Same tokens; log-probs equal but for the order of additions."""
    assert ids_of(found) == ids_of(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.prompt, a.sample_index, a.finish_reason, a.text) == (
            b.prompt, b.sample_index, b.finish_reason, b.text
        )  # fmt: skip
        assert a.rollout_logprobs == pytest.approx(b.rollout_logprobs, rel=1e-4, abs=2e-5)


def check_rollouts_are_whole_and_in_order(setup: EngineSetup) -> None:
    """RO-06, RO-07: by prompt, then sample; ids and log-probs together, stop token included."""
    engine, _ = setup.make(64)
    rollouts = engine.generate(PROMPTS, make_sampling(), group_size=6, seed=1)
    assert [(r.prompt, r.sample_index) for r in rollouts] == [
        (prompt, index) for prompt in PROMPTS for index in range(6)
    ]
    for rollout in rollouts:
        ids = rollout.response_ids
        assert len(ids) == len(rollout.rollout_logprobs)
        assert not set(ids[:-1]) & set(STOPS)
        stopped = ids[-1] in STOPS
        assert rollout.finish_reason == ("stop" if stopped else "length")
        assert len(ids) <= 8 and (stopped or len(ids) == 8)
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    assert len(set(ids_of(rollouts))) > 20
    assert set(ids_of(rollouts[:6])).isdisjoint(ids_of(rollouts[18:]))
    engine.close()


def check_rollout_logprobs_are_those_of_the_model(setup: EngineSetup) -> None:
    """At every temperature, with and without truncated support, and of the trainer too."""
    model = oracle_model(setup.folder)
    engine, policy = setup.make(64)
    for sampling in (
        make_sampling(),
        make_sampling(1.5),
        make_sampling(0.6, stop_token_ids=(), max_response_tokens=4),
        make_sampling(1.0, top_k=5),
        make_sampling(1.0, min_response_tokens=3),
        make_sampling(0.0),
    ):
        for rollout in engine.generate(PROMPTS, sampling, group_size=3, seed=2):
            expected = _expected_logprobs(model, rollout, sampling)
            assert rollout.rollout_logprobs == pytest.approx(expected, rel=2e-5, abs=2e-5)
    batch = pack_rollouts(engine.generate(PROMPTS, make_sampling(), 4, 3), STOPS)
    torch.testing.assert_close(policy.logprobs(batch), batch.rollout_logprobs, **CLOSE)
    engine.close()
    policy.close()


@torch.no_grad()
def _expected_logprobs(model: object, rollout: Rollout, sampling: Sampling) -> list[float]:
    prompt, response = rollout.prompt.token_ids, rollout.response_ids
    rows = next_token_logprobs(model, prompt + response, sampling.temperature)
    rows = rows[len(prompt) - 1 : -1]
    for number, row in enumerate(rows):
        if number < sampling.min_response_tokens:
            row[list(sampling.stop_token_ids)] = -math.inf
        if sampling.top_k:
            row[row < row.sort().values[-sampling.top_k]] = -math.inf
    renormalised = rows.log_softmax(dim=1)
    return [float(row[token]) for row, token in zip(renormalised, response, strict=True)]


def check_greedy_is_the_mode(setup: EngineSetup) -> None:
    """Temperature 0 takes the likeliest token each time, and all samples of a group agree."""
    engine, _ = setup.make(64)
    rollouts = engine.generate(PROMPTS, make_sampling(0.0), group_size=2, seed=0)
    with torch.no_grad():
        for index, prompt in enumerate(PROMPTS):
            tokens = list(prompt.token_ids)
            while len(tokens) < len(prompt.token_ids) + 8 and tokens[-1] not in STOPS:
                row = next_token_logprobs(oracle_model(setup.folder), tokens)[-1]
                tokens.append(int(row.argmax()))
            expected = tuple(tokens[len(prompt.token_ids) :])
            assert ids_of(rollouts[2 * index : 2 * index + 2]) == [expected, expected]
    engine.close()


def check_a_rollout_depends_on_nothing_but_its_own(setup: EngineSetup) -> None:
    """Not on neighbours, their order, group size, or how many run at once (RO-09)."""
    engine, _ = setup.make(64)
    sampling = make_sampling()
    expected = engine.generate(PROMPTS, sampling, group_size=4, seed=3)
    assert_same_rollouts(engine.generate(PROMPTS, sampling, 4, 3), expected)
    alone = [r for p in PROMPTS for r in engine.generate([p], sampling, 4, 3)]
    assert_same_rollouts(alone, expected)
    turned = engine.generate(PROMPTS[::-1], sampling, 4, 3)
    assert_same_rollouts([r for g in (12, 8, 4, 0) for r in turned[g : g + 4]], expected)
    smaller = engine.generate(PROMPTS, sampling, 2, 3)
    assert_same_rollouts(smaller, [r for r in expected if r.sample_index < 2])
    assert ids_of(engine.generate(PROMPTS, sampling, 4, 4)) != ids_of(expected)
    engine.close()
    for at_once in (1, 3):
        engine, _ = setup.make(at_once)
        assert_same_rollouts(engine.generate(PROMPTS, sampling, 4, 3), expected)
        engine.close()


def check_a_row_that_comes_twice_gets_two_groups(setup: EngineSetup) -> None:
    """Sample indices go on, and with them the random numbers."""
    engine, _ = setup.make(64)
    row = PROMPTS[1]
    rollouts = engine.generate([row, PROMPTS[0], row], make_sampling(), group_size=3, seed=0)
    assert [r.sample_index for r in rollouts] == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    again = engine.generate([row], make_sampling(), group_size=6, seed=0)
    assert_same_rollouts(rollouts[:3] + rollouts[6:], again)
    engine.close()


def check_lengths_are_kept(setup: EngineSetup) -> None:
    """A minimum forbids stop tokens, greedy or not; a maximum of 1 gives one token."""
    engine, _ = setup.make(64)
    everything = tuple(range(3, 131))
    for temperature in (0.0, 1.0):
        sampling = make_sampling(temperature, stop_token_ids=everything[60:])
        shortest = min(map(len, ids_of(engine.generate(PROMPTS, sampling, 4, 0))))
        assert shortest < 4
        sampling = replace(sampling, min_response_tokens=4)
        rollouts = engine.generate(PROMPTS, sampling, 4, 0)
        assert min(map(len, ids_of(rollouts))) >= 4
        assert all(math.isfinite(x) for r in rollouts for x in r.rollout_logprobs)
    rollouts = engine.generate(PROMPTS, make_sampling(max_response_tokens=1), 8, 0)
    assert {len(r.response_ids) for r in rollouts} == {1}
    engine.close()


def check_ro_05_new_weights_are_used_at_once(setup: EngineSetup) -> None:
    """After a step and `load_weights`, for a prompt seen before, nothing is left of the old."""
    engine, policy = setup.make(64)
    sampling = make_sampling()
    before = engine.generate(PROMPTS, sampling, 4, 0)
    assert {r.policy_version for r in before} == {0}
    for _ in range(3):
        policy.train_step(pack_rollouts(before, STOPS), sft_objective(), lr=3e-2)
    engine.load_weights(policy.named_weights(), policy_version=3)
    after = engine.generate(PROMPTS, sampling, 4, 0)
    assert {r.policy_version for r in after} == {3}
    batch = pack_rollouts(after, STOPS)
    torch.testing.assert_close(policy.logprobs(batch), batch.rollout_logprobs, **CLOSE)
    old = dict(zip(ids_of(before), before, strict=True))
    same = [(r, old[r.response_ids]) for r in after if r.response_ids in old]
    assert all(abs(a.rollout_logprobs[0] - b.rollout_logprobs[0]) > 1e-3 for a, b in same)
    engine.close()
    policy.close()


def check_sleep_changes_nothing(setup: EngineSetup) -> None:
    """After `sleep`, `wake` and the same weights the same call gives the same rollouts."""
    engine, policy = setup.make(64)
    expected = engine.generate(PROMPTS, make_sampling(), 2, 0)
    engine.sleep()
    engine.wake()
    engine.load_weights(policy.named_weights(), policy_version=0)
    assert_same_rollouts(engine.generate(PROMPTS, make_sampling(), 2, 0), expected)
    engine.close()


ENGINE_CHECKS: list[Callable[[EngineSetup], None]] = [
    check_rollouts_are_whole_and_in_order,
    check_rollout_logprobs_are_those_of_the_model,
    check_greedy_is_the_mode,
    check_a_rollout_depends_on_nothing_but_its_own,
    check_a_row_that_comes_twice_gets_two_groups,
    check_lengths_are_kept,
    check_ro_05_new_weights_are_used_at_once,
    check_sleep_changes_nothing,
]
