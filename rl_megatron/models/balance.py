"""The balance loss of experts, sequence by sequence: equal however a mini-batch is cut.

The usual one multiplies two means over a micro-batch, so its value depends on what is in there
together. This is the sequence-wise loss of DeepSeek-V3 (arXiv 2412.19437, eq. 17-20), of which a
sequence has its own share whatever it is packed with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.distributed import ProcessGroup


class BalanceLoss:
    """The balance loss of one optimiser step, and what the layers of this rank have said of it.

    Args:
        coefficient: Factor of the loss.
        num_sequences: Sequences of the whole mini-batch that have a token.
        device: Where shares are added up.
    """

    def __init__(self, coefficient: float, num_sequences: int, device: torch.device) -> None:
        self.coefficient = coefficient
        self.num_sequences = max(num_sequences, 1)
        self.total = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, share: Tensor) -> Tensor:
        """Note a layer's sum over sequences; its share of the loss, to be differentiated."""
        self.total += share.detach().double() / self.num_sequences
        return share * (self.coefficient / self.num_sequences)


@dataclass(frozen=True)
class Balance:
    """What a router needs to know of a micro-batch.

    Attributes:
        loss: Of the step.
        segments: Sequence of each token that the router sees on this rank, -1 for dummy tokens.
        lengths: Tokens of each sequence of the micro-batch, on all ranks together.
    """

    loss: BalanceLoss
    segments: Int[Tensor, " T_router"]
    lengths: Int[Tensor, " N"]


def balance_share(
    scores: Float[Tensor, "T_router E"],
    chosen: Bool[Tensor, "T_router E"],
    balance: Balance,
    experts_per_token: int,
    group: ProcessGroup,
) -> Float[Tensor, ""]:
    """This rank's tokens' part of the sum over sequences of sum_i f_i P_i, before the coefficient.

    f_i = E / (k T) x the number of a sequence's T tokens that chose expert i, and P_i is the mean
    of their scores; 1 for a sequence that gives every expert the same. The sum over ranks is exact:
    only f, through which no gradient flows, needs the tokens of other ranks.

    Args:
        scores: Router probabilities over all experts; rows add up to 1.
        chosen: The k experts of each token.
        balance: Which sequence each row belongs to.
        experts_per_token: k.
        group: Ranks that share the tokens of a sequence.
    """
    num_sequences, num_experts = balance.lengths.shape[0], scores.shape[1]
    # Dummy tokens go to a row of their own, the last one.
    counts = chosen.new_zeros(num_sequences + 1, num_experts, dtype=torch.int64)
    counts.index_add_(0, balance.segments % (num_sequences + 1), chosen.long())
    if dist.get_world_size(group) > 1:
        dist.all_reduce(counts, group=group)
    lengths = balance.lengths.clamp(min=1)[:, None].double()
    weights = counts[:-1] * (num_experts / experts_per_token) / lengths**2
    weights = torch.cat([weights, weights.new_zeros(1, num_experts)]).to(scores.dtype)
    return (weights[balance.segments] * scores).sum()


class BalancedRouter(TopKRouter):
    """Megatron's router, which adds the balance loss where a step asks for it.

    Attributes:
        balance: Of the micro-batch at work; None where nothing is asked.
    """

    balance: Balance | None = None

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As in Megatron. A layer that is computed again in the backward pass counts there only,
        where gradients are on."""
        probs, chosen = super().routing(logits, *args, **kwargs)
        if self.balance is None or not torch.is_grad_enabled():
            return probs, chosen
        scores = logits.view(-1, logits.shape[-1]).softmax(dim=-1, dtype=torch.float32)
        share = balance_share(scores, chosen.bool(), self.balance, self.topk, self.tp_cp_group)
        return MoEAuxLossAutoScaler.apply(probs, self.balance.loss.add(share)), chosen


def set_router(layer_spec: Any) -> None:
    """Put `BalancedRouter` into the specification of a layer with experts."""
    mlp = layer_spec.submodules.mlp
    # Newer releases bind the submodules to the class, older ones have a specification of both.
    modules = mlp.keywords["submodules"] if hasattr(mlp, "keywords") else mlp.submodules
    modules.router = BalancedRouter


def prepare_scale(device: torch.device) -> None:
    """Give Megatron the tensor in which it keeps the scale of such losses.

    Left alone it keeps the first scale that it is told, and that of log-probs before the first step
    is an inference tensor: the step could not set it.
    """
    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.ones(1, device=device)


def follow_balance(layer: torch.nn.Module) -> None:
    """Make a layer hand its router the balance of the sequences it is called with.

    By the call and not by the step: a layer that is computed again in the backward pass has another
    micro-batch than the one that came last.
    """

    def hand_over(module: Any, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module.mlp.router.balance = kwargs["packed_seq_params"].balance

    layer.register_forward_pre_hook(hand_over, with_kwargs=True)
