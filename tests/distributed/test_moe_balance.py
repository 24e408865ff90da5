"""The balance loss of experts: the formula, its gradient, and the same on every layout."""

import copy

import pytest
import torch

from rl_megatron.data.packing import MicroBatching
from rl_megatron.interfaces.objective import ModelOutput
from rl_megatron.losses import grpo_objective, totals
from tests.helpers.backend_contract import OPTIMIZER, TEMPERATURE, lopsided_batch
from tests.helpers.megatron_job import LAYOUTS, gradients_of, make_backend, start
from tests.helpers.oracle import batch_logprobs, oracle_model
from tests.helpers.tiny_model import make_tiny_hf

# As large as the loss itself, so that a mistake in either shows.
COEFFICIENT = 0.4
LAYERS = 4
MODELS = {"qwen3_moe": {"norm_topk_prob": True}, "mixtral": {}}
OBJECTIVE = grpo_objective(max_response_tokens=8, loss_agg_mode="token-mean")
NO_CLIPPING = OPTIMIZER.model_copy(update={"clip_grad": 0.0})
SIZES = {
    "one": MicroBatching(micro_batch_size=1),
    "two padded": MicroBatching(micro_batch_size=2, packed=False),
    "tokens": MicroBatching(max_tokens_per_micro_batch=20),
    "all": MicroBatching(micro_batch_size=1000),
    "all padded": MicroBatching(micro_batch_size=1000, packed=False),
}


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    """(folder, batch) of each model. One response is empty: its prompt counts all the same."""
    made = {}
    for family, settings in MODELS.items():
        folder = make_tiny_hf(
            tmp_path_factory.mktemp(family), family, layers=LAYERS, width=0.15, **settings
        )
        made[family] = folder, lopsided_batch(folder, paired=False)
    return made


def balance_by_hand(model, batch):
    """Sum over layers of the mean over sequences of sum_i f_i P_i, from the router's logits."""
    config = model.config
    num_experts = getattr(config, "num_experts", None) or config.num_local_experts
    total, num_sequences = 0.0, 0
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        layers = model(tokens[None], output_router_logits=True).router_logits
        assert len(layers) == LAYERS
        num_sequences += 1
        for logits in layers:
            scores = logits.softmax(dim=1)
            for expert in range(num_experts):
                chosen = (logits.topk(config.num_experts_per_tok).indices == expert).sum()
                often = num_experts * float(chosen) / (config.num_experts_per_tok * len(tokens))
                total = total + often * scores[:, expert].mean()
    return total / num_sequences


@pytest.fixture(scope="module")
def oracle(problem):
    """(balance, loss, gradients by names in files) in float64, through transformers."""
    from rl_megatron.models.transformers_model import named_weights

    found = {}
    for family, (folder, batch) in problem.items():
        model = copy.deepcopy(oracle_model(folder))
        weighed = OBJECTIVE.weigh(batch)
        logprobs = batch_logprobs(model, weighed, TEMPERATURE)
        output = ModelOutput(logprobs, torch.zeros_like(logprobs))
        balance = balance_by_hand(model, batch)
        loss = OBJECTIVE.loss(output, weighed, totals(weighed)).loss + COEFFICIENT * balance
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.grad)
        found[family] = balance.item(), loss.item(), dict(named_weights(model))
    return found


def step_job(layout, folder, batch, size, settings):
    """Metrics and gradient of one step, after log-probs have been asked for."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # As in a process that has just begun.
    backend = make_backend(
        folder,
        start(layout),
        SIZES[size],
        NO_CLIPPING,
        distributed_optimizer=False,
        **{"moe_aux_loss_coeff": COEFFICIENT} | settings,
    )
    backend.logprobs(batch)
    metrics = backend.train_step(batch, OBJECTIVE, lr=0.0)
    gradients = gradients_of(backend)
    backend.close()
    return metrics, gradients


def assert_those_of_the_oracle(found, expected):
    (metrics, gradients), (balance, loss, want) = found, expected
    assert metrics["loss/moe_balance"] == pytest.approx(balance, rel=1e-6)
    assert metrics["loss/total"] == pytest.approx(loss, rel=1e-6)
    assert sorted(gradients) == sorted(want)
    off = {
        name: float((value.double() - want[name]).norm() / want[name].norm())
        for name, value in gradients.items()
    }
    assert {name: error for name, error in off.items() if not error <= 2e-5} == {}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("size", ["all", "one"])
def test_one_rank_has_the_loss_and_gradient_of_the_oracle(size, family, problem, oracle, pool):
    (found,) = pool(1).run(step_job, "tp1", *problem[family], size, {})
    assert_those_of_the_oracle(found, oracle[family])
    assert LAYERS < found[0]["loss/moe_balance"] < 2 * LAYERS


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ("tp1", "two padded"),
        ("tp1", "tokens"),
        ("tp2-sp", "tokens"),
        ("tp2-sp", "all padded"),
        ("dp2", "one"),
        ("ep2", "all padded"),
        ("ep2-cp2", "tokens"),
        ("ep2-cp2", "two padded"),
        ("pp2-vpp2", "one"),
        ("ep2-pp2", "two padded"),
        ("ep2-tp2-sp", "one"),
        ("cp2-tp2-sp", "tokens"),
    ],
)
def test_every_split_has_the_loss_and_gradient_of_the_oracle(layout, size, problem, oracle, pool):
    for found in pool(LAYOUTS[layout].world_size).run(
        step_job, layout, *problem["qwen3_moe"], size, {}
    ):
        assert_those_of_the_oracle(found, oracle["qwen3_moe"])


# With a pipeline a layer is computed again when other micro-batches have been through it since.
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("tp1", {"recompute": "full"}),
        ("pp2-vpp2", {"recompute": "full"}),
        ("tp2-sp", {"recompute": "full"}),
        ("tp1", {"one_pass": True}),
    ],
)
def test_recomputed_layers_count_once(layout, settings, problem, oracle, pool):
    for found in pool(LAYOUTS[layout].world_size).run(
        step_job, layout, *problem["qwen3_moe"], "one", settings
    ):
        assert_those_of_the_oracle(found, oracle["qwen3_moe"])


def test_off_is_without_a_trace(problem, oracle, pool):
    folder, batch = problem["qwen3_moe"]
    ((metrics, gradients),) = pool(1).run(
        step_job, "tp1", folder, batch, "all", {"moe_aux_loss_coeff": 0.0}
    )
    assert "loss/moe_balance" not in metrics
    assert metrics["loss/total"] == pytest.approx(metrics["loss/policy"])
    router = "model.layers.0.mlp.gate.weight"
    want = oracle["qwen3_moe"][2][router]
    # What it adds is no small part of the gradient: the tests above would notice its absence.
    assert float((gradients[router] - want).norm() / want.norm()) > 0.1


def hand_worked_job():
    from rl_megatron.models.balance import Balance, BalanceLoss, balance_share

    process = start("tp1")
    scores = torch.tensor([[0.5, 0.5], [0.75, 0.25], [0.25, 0.75], [0.9, 0.1]], requires_grad=True)
    chosen = torch.tensor([[1, 0], [1, 0], [0, 1], [1, 0]]).bool()
    # Two sequences, of three tokens and of none, and a dummy token at the end.
    loss = BalanceLoss(0.1, 2, process.device)
    balance = Balance(loss, torch.tensor([0, 0, 0, -1]), torch.tensor([3, 0]))
    share = balance_share(scores, chosen, balance, 1, process.tensor_group)
    loss.add(share).backward()
    return share.item(), loss.total.item(), scores.grad


def test_a_hand_worked_sequence(pool):
    """f = 2 / 3 x (2, 1) and P = (0.5, 0.5): 1 in all; dummy tokens have no part in it."""
    share, total, gradient = pool(1).run(hand_worked_job)[0]
    assert share == pytest.approx(1.0)
    assert total == pytest.approx(0.5)
    rows = [[0.1 / 2 * 4 / 9, 0.1 / 2 * 2 / 9]] * 3 + [[0.0, 0.0]]
    torch.testing.assert_close(gradient, torch.tensor(rows))
