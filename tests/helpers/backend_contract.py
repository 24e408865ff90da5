"""What every backend must do: one set of checks, run on each of them.

A check takes a setup that makes fresh backends with the weights of one tiny model folder. All ranks
of a job run the same check; assertions hold on each of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_megatron.checkpoint.saving import Saving
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.data.packing import MicroBatching
from rl_megatron.errors import NumericsError
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.objective import LossOutput, ModelOutput, Objective, Totals
from rl_megatron.interfaces.protocols import PolicyBackend
from rl_megatron.losses import dpo_objective, grpo_objective, sft_objective
from tests.helpers.oracle import batch_logprobs, oracle_model

# The large eps keeps Adam from dividing rounding errors of tiny gradients by tiny gradients.
# Betas far from the usual ones show after two steps.
OPTIMIZER = OptimizerConfig(
    lr=1e-2, weight_decay=0.1, clip_grad=1.0, adam_beta1=0.8, adam_beta2=0.5, adam_eps=1e-4
)
WHOLE = MicroBatching(micro_batch_size=1000)
TEMPERATURE = 0.8
# float32 in two different orders.
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


@dataclass(frozen=True)
class BackendSetup:
    """How to make a backend under test.

    Attributes:
        folder: Model folder of `make_tiny_hf`, float32.
        make: (micro-batching, optimizer or None) to a fresh backend at `TEMPERATURE`.
        empty_folder: A folder, the same for all ranks, made and empty on return; by name.
        vocab_size: Of the model.
    """

    folder: Path
    make: Callable[[MicroBatching, OptimizerConfig | None], PolicyBackend]
    empty_folder: Callable[[str], Path]
    vocab_size: int = 131


def make_batch(
    num_sequences: int = 8, vocab_size: int = 131, paired: bool = False, seed: int = 0
) -> PackedBatch:
    """Unequal prompts and responses, with advantages; the last response but one is empty."""
    generator = torch.Generator().manual_seed(seed)
    lengths, masks = [], []
    for index in range(num_sequences):
        prompt, response = torch.randint(1, 9, (2,), generator=generator).tolist()
        if index == num_sequences - 2 and not paired:
            response = 0
        lengths.append(prompt + response)
        masks += [False] * prompt + [True] * response
    total = sum(lengths)
    return PackedBatch(
        tokens=torch.randint(3, vocab_size, (total,), generator=generator),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        response_mask=torch.tensor(masks),
        sequence_ids=torch.arange(num_sequences),
        paired=paired,
        advantages=torch.randn(total, generator=generator),
    )


def lopsided_batch(folder: Path, paired: bool) -> PackedBatch:
    """`make_batch` with ratios on both sides of the clipping bounds, for the model of a folder.

    Advantages and distances to the reference lean to one side: a mean in which everything cancels
    would have no digits to compare.
    """
    batch = make_batch(paired=paired)
    assert batch.advantages is not None
    generator = torch.Generator().manual_seed(7)
    logprobs = batch_logprobs(oracle_model(folder), batch, TEMPERATURE).detach().float()
    noise = 0.3 * torch.randn(2, batch.num_tokens, generator=generator)
    lean = torch.where(batch.segment_ids % 2 == 0, -0.5, 0.5)
    return batch.with_fields(
        old_logprobs=logprobs + noise[0],
        ref_logprobs=logprobs + noise[1] + lean,
        advantages=batch.advantages + 1,
    )


def weights_of(backend: PolicyBackend) -> dict[str, Tensor]:
    """Copies of all weights, on the host."""
    return {name: value.to("cpu", copy=True) for name, value in backend.named_weights()}


def assert_same_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal to the bit."""
    assert list(found) == list(expected)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def assert_close_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal but for the order of additions."""
    assert sorted(found) == sorted(expected)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], atol=5e-5, rtol=1e-4, msg=name)


def check_logprobs_are_those_of_the_model(setup: BackendSetup) -> None:
    """fp32, on the host, at the temperature, 0 outside the mask; trained or frozen."""
    batch = make_batch(vocab_size=setup.vocab_size)
    expected = batch_logprobs(oracle_model(setup.folder), batch, TEMPERATURE).detach()
    for optimizer in (OPTIMIZER, None):
        backend = setup.make(WHOLE, optimizer)
        found = backend.logprobs(batch)
        assert (found.dtype, found.device.type) == (torch.float32, "cpu")
        assert not found.requires_grad
        torch.testing.assert_close(found.double(), expected, **CLOSE)
        assert not found[~batch.response_mask].any()
        assert torch.equal(backend.logprobs(batch), found)
        backend.close()


def check_micro_batches_change_nothing(setup: BackendSetup) -> None:
    """Log-probs, every metric, and the weights after two steps are the same for any split."""
    batch = make_batch(vocab_size=setup.vocab_size)
    batch = batch.with_fields(old_logprobs=setup.make(WHOLE, None).logprobs(batch))
    expected = None
    for split in (
        WHOLE,
        MicroBatching(micro_batch_size=1),
        MicroBatching(micro_batch_size=3),
        MicroBatching(max_tokens_per_micro_batch=20),
    ):
        backend = setup.make(split, OPTIMIZER)
        found = [backend.logprobs(batch)]
        metrics = [
            backend.train_step(batch, grpo_objective(max_response_tokens=8), lr=1e-3)
            for _ in range(2)
        ]
        outcome = (found[0], metrics, weights_of(backend))
        backend.close()
        if expected is None:
            expected = outcome
            continue
        torch.testing.assert_close(outcome[0], expected[0], **CLOSE)
        for now, before in zip(outcome[1], expected[1], strict=True):
            assert now == pytest.approx(before, rel=1e-4, abs=1e-6)
        assert_close_weights(outcome[2], expected[2])


def check_a_step_is_adamw_on_the_gradient(setup: BackendSetup) -> None:
    """Two steps against autograd and torch's AdamW on the float64 model, with clipping."""
    batch = make_batch(vocab_size=setup.vocab_size)
    settings = OPTIMIZER.model_copy(update={"clip_grad": 0.5})
    backend = setup.make(MicroBatching(micro_batch_size=3), settings)
    model = _copy_of_oracle(setup.folder)
    # Decoupled decay on matrices only; the moments as in the settings.
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
    )
    for lr in (1e-2, 3e-3):
        adam.zero_grad()
        logprobs = batch_logprobs(model, batch, TEMPERATURE)
        loss = -logprobs.sum() / batch.response_mask.sum()
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        norm = float(torch.cat([g.flatten() for g in gradients]).norm())
        assert norm > 0.5
        for gradient in gradients:
            gradient *= 0.5 / (norm + 1e-6)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        metrics = backend.train_step(batch, sft_objective(), lr)
        assert metrics["loss/total"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["optimizer/grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert metrics["optimizer/lr"] == lr
        assert all(type(value) is float for value in metrics.values())
    expected = {name: p.detach().float() for name, p in model.named_parameters()}
    assert_close_weights(weights_of(backend), expected)
    backend.close()


def _copy_of_oracle(folder: Path) -> torch.nn.Module:
    shared = oracle_model(folder)
    model = type(shared)(shared.config).double()
    model.load_state_dict(shared.state_dict())
    return model.eval()


def check_identities_before_the_first_step(setup: BackendSetup) -> None:
    """Ratio 1 and no clipping for GRPO, ln 2 for DPO."""
    batch = make_batch(vocab_size=setup.vocab_size)
    backend = setup.make(MicroBatching(micro_batch_size=2), OPTIMIZER)
    batch = batch.with_fields(old_logprobs=backend.logprobs(batch))
    metrics = backend.train_step(batch, grpo_objective(max_response_tokens=8), lr=1e-3)
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy/approx_kl"] == pytest.approx(0.0, abs=1e-6)
    backend.close()
    pairs = make_batch(vocab_size=setup.vocab_size, paired=True)
    backend = setup.make(MicroBatching(micro_batch_size=2), OPTIMIZER)
    pairs = pairs.with_fields(ref_logprobs=backend.logprobs(pairs))
    metrics = backend.train_step(pairs, dpo_objective(beta=0.1), lr=1e-3)
    assert metrics["loss/total"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["rewards/margins"] == pytest.approx(0.0, abs=1e-6)
    backend.close()


def check_steps_lower_the_loss(setup: BackendSetup) -> None:
    """Overfitting one small batch works."""
    batch = make_batch(num_sequences=4, vocab_size=setup.vocab_size)
    backend = setup.make(WHOLE, OPTIMIZER)
    losses = [backend.train_step(batch, sft_objective(), lr=1e-2)["loss/total"] for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]
    backend.close()


def check_values_outside_the_mask_change_nothing(setup: BackendSetup) -> None:
    """NaN under mask 0 is not seen: same metrics and weights to the bit."""
    batch = make_batch(vocab_size=setup.vocab_size)
    batch = batch.with_fields(old_logprobs=setup.make(WHOLE, None).logprobs(batch))
    broken = batch.with_fields(
        **{
            name: torch.where(batch.response_mask, getattr(batch, name), math.nan)
            for name in ("old_logprobs", "advantages")
        }
    )
    outcomes = []
    for given in (batch, broken):
        backend = setup.make(WHOLE, OPTIMIZER)
        metrics = backend.train_step(given, grpo_objective(max_response_tokens=8), lr=1e-2)
        outcomes.append((metrics, weights_of(backend)))
        backend.close()
    assert outcomes[0][0] == outcomes[1][0]
    assert_same_weights(outcomes[1][1], outcomes[0][1])


def check_a_broken_step_is_not_taken(setup: BackendSetup) -> None:
    """A loss or gradient that is not finite: an error, and as if the step had never been tried."""
    batch = make_batch(vocab_size=setup.vocab_size)
    plain, tried = setup.make(WHOLE, OPTIMIZER), setup.make(WHOLE, OPTIMIZER)
    for backend in (plain, tried):
        backend.train_step(batch, sft_objective(), lr=1e-2)
    before = weights_of(tried)
    for scale in (math.nan, math.inf):
        with pytest.raises(NumericsError, match="weights are as before"):
            tried.train_step(batch, _broken_objective(scale), lr=1e-2)
        assert_same_weights(weights_of(tried), before)
    metrics = [backend.train_step(batch, sft_objective(), lr=1e-2) for backend in (plain, tried)]
    assert metrics[0] == metrics[1]
    assert_same_weights(weights_of(tried), weights_of(plain))
    plain.close()
    tried.close()


def _broken_objective(scale: float) -> Objective:
    sft = sft_objective()

    def loss(output: ModelOutput, batch: PackedBatch, totals: Totals) -> LossOutput:
        share = sft.loss(output, batch, totals)
        return replace(share, loss=share.loss * scale)

    return Objective(name="broken", weigh=sft.weigh, loss=loss)


def check_saved_and_loaded_goes_on_to_the_bit(setup: BackendSetup) -> None:
    """Weights and optimizer state: a fresh backend goes on exactly as the saved one does."""
    batch = make_batch(vocab_size=setup.vocab_size)
    saved = setup.make(WHOLE, OPTIMIZER)
    saved.train_step(batch, sft_objective(), lr=1e-2)
    folder = setup.empty_folder("saved")
    saved.save(folder)
    at_save = weights_of(saved)
    fresh = setup.make(WHOLE, OPTIMIZER)
    fresh.load(folder)
    assert_same_weights(weights_of(fresh), at_save)
    metrics = [backend.train_step(batch, sft_objective(), lr=1e-2) for backend in (saved, fresh)]
    assert metrics[0] == metrics[1]
    assert_same_weights(weights_of(fresh), weights_of(saved))
    saved.close()
    fresh.close()


def check_a_step_waits_until_a_save_has_read_the_state(setup: BackendSetup) -> None:
    """What is written in the background is the moment of the save, on a disk however slow."""
    batch = make_batch(vocab_size=setup.vocab_size)
    saved = setup.make(WHOLE, OPTIMIZER)
    saved.train_step(batch, sft_objective(), lr=1e-2)
    at_save = weights_of(saved)
    folder = setup.empty_folder("slow")
    write = Saving._write

    def write_late(saving: Saving) -> list[Any]:
        time.sleep(1.0)
        return write(saving)

    Saving._write = write_late  # type: ignore[method-assign]
    try:
        saving = saved.save(folder, background=True)
    finally:
        Saving._write = write  # type: ignore[method-assign]
    metrics = saved.train_step(batch, sft_objective(), lr=1e-2)
    saving.finish()
    fresh = setup.make(WHOLE, OPTIMIZER)
    fresh.load(folder)
    assert_same_weights(weights_of(fresh), at_save)
    assert fresh.train_step(batch, sft_objective(), lr=1e-2) == metrics
    assert_same_weights(weights_of(fresh), weights_of(saved))
    saved.close()
    fresh.close()


def check_named_weights_are_those_of_the_folder(setup: BackendSetup) -> None:
    """Every Hugging Face name once, bit by bit as loaded; other values after a step."""
    expected = {name: p.float() for name, p in oracle_model(setup.folder).named_parameters()}
    backend = setup.make(WHOLE, OPTIMIZER)
    found = weights_of(backend)
    assert_same_weights(dict(sorted(found.items())), dict(sorted(expected.items())))
    backend.train_step(make_batch(vocab_size=setup.vocab_size), sft_objective(), lr=1e-2)
    after = weights_of(backend)
    assert [name for name in found if torch.equal(after[name], found[name])] == []
    backend.close()


def check_offload_changes_nothing(setup: BackendSetup) -> None:
    """Weights and optimizer state come back as they were."""
    batch = make_batch(vocab_size=setup.vocab_size)
    outcomes = []
    for moves in (False, True):
        backend = setup.make(WHOLE, OPTIMIZER)
        for _ in range(2):
            metrics = backend.train_step(batch, sft_objective(), lr=1e-2)
            if moves:
                backend.offload()
                backend.onload()
        outcomes.append((metrics, backend.logprobs(batch)))
        backend.close()
    assert outcomes[0][0] == outcomes[1][0]
    assert torch.equal(outcomes[0][1], outcomes[1][1])


BACKEND_CHECKS: list[Callable[[BackendSetup], None]] = [
    check_logprobs_are_those_of_the_model,
    check_micro_batches_change_nothing,
    check_a_step_is_adamw_on_the_gradient,
    check_identities_before_the_first_step,
    check_steps_lower_the_loss,
    check_values_outside_the_mask_change_nothing,
    check_a_broken_step_is_not_taken,
    check_saved_and_loaded_goes_on_to_the_bit,
    check_a_step_waits_until_a_save_has_read_the_state,
    check_named_weights_are_those_of_the_folder,
    check_offload_changes_nothing,
]
