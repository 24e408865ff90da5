"""A reward model has the same scores, metrics and gradients on every layout, and where they are
read depends on nothing but the lengths of the sequences."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from rl_megatron.data.packing import MicroBatching
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.objective import ModelOutput
from rl_megatron.losses import reward_model_objective, totals
from tests.helpers.backend_contract import OPTIMIZER, make_batch, weights_of
from tests.helpers.megatron_job import LAYOUTS, gradients_of, make_backend, start
from tests.helpers.oracle import batch_scores, oracle_reward_model
from tests.helpers.tiny_model import EOS, PAD, make_tiny_hf

OBJECTIVE = reward_model_objective(center_rewards_coefficient=0.05)
NO_CLIPPING = OPTIMIZER.model_copy(update={"clip_grad": 0.0})
SPLITS = (
    MicroBatching(micro_batch_size=2),
    MicroBatching(micro_batch_size=1),
    MicroBatching(micro_batch_size=1000, packed=False),
)
EVERY_LAYOUT = ("tp1", "tp2", "tp2-sp", "pp2", "cp2", "dp2", "cp2-tp2-sp", "tp2-pp2-sp")
MODELS = {"qwen3-tied": {"family": "qwen3", "tie": True}, "qwen2": {"family": "qwen2"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: make_tiny_hf(
            tmp_path_factory.mktemp(name), layers=4, width=0.15, scalar_head=True, **settings
        )
        for name, settings in MODELS.items()
    }


@pytest.fixture(scope="module")
def batch():
    """Pairs with margins; one side of a pair has no response."""
    made = make_batch(num_sequences=10, paired=True)
    mask = made.response_mask.clone()
    mask[made.token_index([5])] = False
    asked = torch.tensor([0.3, -0.2, 1.0, 0.0, 0.5])
    return made.with_fields(response_mask=mask, margins=asked.repeat_interleave(2))


def expected_step(folder, batch):
    """Scores, metrics and gradient by transformers in float64, one sequence at a time."""
    model = oracle_reward_model(folder)
    model.zero_grad()
    scores = batch_scores(model, batch)
    batch = OBJECTIVE.weigh(batch)
    output = OBJECTIVE.loss(ModelOutput.of_scores(scores), batch, totals(batch))
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    metrics = {"loss/total": output.loss.item()} | {k: float(v) for k, v in output.metrics.items()}
    return scores.detach(), metrics, gradients


def step_job(layout, folder, batch):
    """Scores, metrics and the gradient of one step, for each split."""
    found = []
    for split in SPLITS:
        backend = make_backend(
            folder, start(layout), split, NO_CLIPPING, distributed_optimizer=False
        )
        scores = backend.scores(batch)
        metrics = backend.train_step(batch, OBJECTIVE, lr=0.0)
        found.append((scores, metrics, gradients_of(backend)))
        backend.close()
    return found


@pytest.mark.parametrize(
    ("layout", "model"),
    [(layout, "qwen3-tied") for layout in EVERY_LAYOUT] + [("tp2-sp", "qwen2"), ("pp2", "qwen2")],
)
def test_scores_metrics_and_every_gradient_are_those_of_one_rank(
    layout, model, folders, batch, pool
):
    scores, metrics, gradients = expected_step(folders[model], batch)
    ranks = pool(LAYOUTS[layout].world_size).run(step_job, layout, folders[model], batch)
    for by_split in ranks:
        for found_scores, found_metrics, found in by_split:
            torch.testing.assert_close(found_scores.double(), scores, atol=1e-5, rtol=1e-5)
            for name, value in metrics.items():
                assert math.isclose(found_metrics[name], value, rel_tol=2e-5, abs_tol=2e-6), name
            assert sorted(found) == sorted(gradients)
            off = {
                name: float((value.double() - gradients[name]).norm() / gradients[name].norm())
                for name, value in found.items()
            }
            assert {name: error for name, error in off.items() if not error <= 2e-5} == {}
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
    assert ranks[0][0][1]["optimizer/grad_norm"] == pytest.approx(float(norm), rel=2e-5)


def torch_job(folder, batch):
    from rl_megatron.backends.torch import TorchBackend
    from rl_megatron.parallel.process import start_data_parallel

    found = []
    for split in SPLITS:
        backend = TorchBackend(folder, start_data_parallel(), split, optimizer=OPTIMIZER)
        found.append((backend.scores(batch), backend.train_step(batch, OBJECTIVE, lr=1e-3)))
        weights = weights_of(backend)
    return found, weights


def two_steps_job(layout, folder, batch):
    """The distributed optimizer, clipping on; saved, loaded by a fresh backend, and gone on."""
    backend = make_backend(folder, start(layout), SPLITS[0])
    metrics = backend.train_step(batch, OBJECTIVE, lr=1e-3)
    return metrics, weights_of(backend)


@pytest.mark.parametrize("layout", ["tp1", "tp2-sp", "pp2", "dp2"])
def test_a_step_is_that_of_the_torch_backend(layout, folders, batch, pool):
    folder = folders["qwen2"]
    scores, metrics, _ = expected_step(folder, batch)
    by_split, want_weights = torch_job(folder, batch)
    for found_scores, found_metrics in by_split:
        torch.testing.assert_close(found_scores.double(), scores, atol=1e-5, rtol=1e-5)
        for name, value in metrics.items():
            assert math.isclose(found_metrics[name], value, rel_tol=2e-5, abs_tol=2e-6), name
    for found_metrics, weights in pool(LAYOUTS[layout].world_size).run(
        two_steps_job, layout, folder, batch
    ):
        assert found_metrics == pytest.approx(by_split[0][1], rel=1e-5, abs=1e-6)
        assert weights.keys() == want_weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(value, want_weights[name], atol=5e-5, rtol=1e-4)


def read_job(rows, packed):
    """What is read of rows of scores by token, dealt into one micro-batch; and each row alone."""
    from rl_megatron.backends.megatron.micro_batch import make_micro_batch

    process = start("tp1")
    lengths = torch.tensor([len(row) for row in rows])
    batch = PackedBatch(
        tokens=torch.tensor([token for row in rows for token, _ in row]),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        response_mask=torch.zeros(int(lengths.sum()), dtype=torch.bool),
        sequence_ids=torch.arange(len(rows)),
    )
    values = torch.tensor([score for row in rows for _, score in row])
    found = []
    for members in (range(len(rows)), *([i] for i in range(len(rows)))):
        part = batch.select(members)
        micro_batch = make_micro_batch(part, process, packed, scalar_head=True)
        given = torch.full((1, micro_batch.tokens.shape[1]), math.nan)
        given[0, micro_batch.place] = values[batch.token_index(members)]
        found.append(micro_batch.output(given).scores)
    return found


@pytest.mark.parametrize("packed", [True, False])
def test_rw_08_the_score_is_read_at_the_end_that_the_length_says(packed, pool):
    """The case's rows, its left padding left out: pad and eos are 0, and 0 stands inside, too."""
    rows = [
        [(5, 0.0), (0, 0.1), (6, 0.2), (0, 0.3)],
        [(5, 0.2), (0, 0.3), (6, 0.4), (0, 0.5)],
        [(token, 0.1 * j) for j, token in enumerate([5, 0, 6, 7, 8, 9])],
    ]
    together, *alone = pool(1).run(read_job, rows, packed)[0]
    assert together.tolist() == pytest.approx([0.3, 0.5, 0.5])
    assert torch.cat(alone).tolist() == together.tolist()
    assert pool(1).run(read_job, [[], rows[0]], packed)[0][0].tolist() == pytest.approx([0.0, 0.3])


def scores_job(layout, folder, batch):
    from rl_megatron.data.packing import MicroBatching

    backend = make_backend(folder, start(layout), optimizer=None)
    whole = backend.scores(batch)
    backend.micro_batching = MicroBatching(micro_batch_size=1)
    return whole, backend.scores(batch)


@pytest.mark.parametrize("layout", ["tp1", "tp2-sp", "cp2", "dp2"])
def test_rw_08_no_score_depends_on_its_company_or_on_what_its_tokens_are(layout, folders, pool):
    """Sequences of 3, 5, 2 and 4 tokens with pad and eos inside and at the end."""
    ids = [[7, EOS, 9], [8, PAD, EOS, 9, EOS], [7, PAD], [PAD, EOS, PAD, EOS]]
    batch = PackedBatch(
        tokens=torch.tensor(sum(ids, [])),
        cu_seqlens=torch.tensor([0, 3, 8, 10, 14]),
        response_mask=torch.zeros(14, dtype=torch.bool),
        sequence_ids=torch.arange(4),
    )
    want = batch_scores(oracle_reward_model(folders["qwen2"]), batch).detach()
    for whole, alone in pool(LAYOUTS[layout].world_size).run(
        scores_job, layout, folders["qwen2"], batch
    ):
        for found in (whole, alone):
            torch.testing.assert_close(found.double(), want, atol=1e-5, rtol=1e-5)


def files_job(layout, folder, batch, root, output):
    """Saved as Megatron and as Hugging Face; digest, scores, and scores of what was saved."""
    from rl_megatron.checkpoint.digest import model_digest
    from rl_megatron.checkpoint.hf_files import carry_hf_files
    from rl_megatron.checkpoint.hf_save import save_hf
    from rl_megatron.checkpoint.publish import new_checkpoint

    process = start(layout)
    backend = make_backend(folder, process)
    digest = model_digest(backend.chunks, backend.rules, process)
    save_hf(output, backend.named_weights(), folder, process)
    backend.train_step(batch, OBJECTIVE, lr=1e-2)
    with new_checkpoint(root, 1, process) as aside:
        backend.save(aside)
        if process.is_main:
            carry_hf_files(folder, aside / "hf")
    return digest, backend.scores(batch)


def load_job(layout, folder, batch, root):
    backend = make_backend(folder, start(layout))
    backend.load(root / "iter_0000001")
    return backend.scores(batch), backend.train_step(batch, OBJECTIVE, lr=1e-2)


@pytest.mark.parametrize(("saved", "loaded"), [("tp2-sp", "pp2"), ("pp2-vpp2", "dp2")])
def test_files_come_back_bit_equal_and_checkpoints_under_another_layout(
    saved, loaded, folders, batch, pool, tmp_path
):
    from rl_megatron.checkpoint.digest import folder_digest

    folder, output = folders["qwen3-tied"], tmp_path / "out"
    found = pool(2).run(files_job, saved, folder, batch, tmp_path / "root", output)
    assert {digest for digest, _ in found} == {folder_digest(folder), folder_digest(output)}
    weights, expected = (load_file(f / "model.safetensors") for f in (output, folder))
    assert "score.weight" in weights and "lm_head.weight" not in weights
    assert weights.keys() == expected.keys()
    assert all(weights[name].equal(expected[name]) for name in weights)
    for file in ("config.json", "tokenizer.json"):
        assert (output / file).read_bytes() == (folder / file).read_bytes()
    record = json.loads((tmp_path / "root/iter_0000001/hf/conversion.json").read_text())
    assert record["tensors"]["score.weight"] == {"dtype": "F32", "shape": [1, 32]}
    again = pool(2).run(load_job, loaded, folder, batch, tmp_path / "root")
    torch.testing.assert_close(again[0][0], found[0][1], atol=1e-5, rtol=1e-5)


def fresh_job(layout, folder, head, batch, root):
    """A scalar head on a language model: by its files, and by its Megatron checkpoint."""
    from rl_megatron.checkpoint.megatron import load_megatron

    process = start(layout)
    backend = make_backend(folder, process, head=head)
    if not root.exists():
        make_backend(folder, start(layout)).save(process_folder(process, root))
    by_files = weights_of(backend)
    for chunk in backend.chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(math.nan)
    load_megatron(root, backend.chunks, head=head)
    return by_files, weights_of(backend), backend.scores(batch)


def process_folder(process, root):
    if process.is_main:
        root.mkdir()
    process.barrier()
    return root


def test_a_language_model_gets_the_same_new_head_on_every_layout(batch, pool, tmp_path):
    from dataclasses import replace

    from rl_megatron.models.families import read_shape
    from rl_megatron.models.fresh_head import fresh_head

    folder = make_tiny_hf(tmp_path / "hf", "qwen3", tie=True, layers=4)
    shape = replace(read_shape(folder), initializer_range=0.5)
    head = fresh_head(shape, seed=3)
    assert torch.equal(head, fresh_head(shape, seed=3))
    assert not torch.equal(head, fresh_head(shape, seed=4))
    assert head.shape == (1, 32) and 0.3 < float(head.std()) < 0.7
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float64
    ).eval()
    model.score.weight.data.copy_(head)
    want = batch_scores(model, batch).detach()
    held = load_file(folder / "model.safetensors") | {"score.weight": head}
    for layout in ("tp1", "tp2-sp", "pp2", "dp2"):
        for by_files, by_checkpoint, scores in pool(LAYOUTS[layout].world_size).run(
            fresh_job, layout, folder, head, batch, tmp_path / "megatron"
        ):
            torch.testing.assert_close(scores.double(), want, atol=2e-5, rtol=2e-5)
            for weights in (by_files, by_checkpoint):
                assert weights.keys() == held.keys()
                assert all(weights[name].equal(held[name]) for name in weights)


def test_experts_may_carry_a_scalar_head(pool, batch, tmp_path):
    folder = make_tiny_hf(tmp_path, "qwen3_moe", layers=4, width=0.15, scalar_head=True)
    one = pool(1).run(step_job, "tp1", folder, batch)[0][0]
    for by_split in pool(2).run(step_job, "ep2", folder, batch):
        scores, metrics, _ = by_split[0]
        torch.testing.assert_close(scores, one[0], atol=1e-5, rtol=1e-5)
        assert metrics == pytest.approx(one[1], rel=2e-5, abs=1e-6)
