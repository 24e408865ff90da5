"""Losses as pure functions of tensors and numbers, and the objectives bound from them."""

from rl_megatron.losses.aggregate import LOSS_AGG_MODES, aggregation_weights, totals
from rl_megatron.losses.dpo import dpo_objective
from rl_megatron.losses.grpo import grpo_objective
from rl_megatron.losses.kl import KLController, KLEstimator, kl_penalised_rewards, sequence_kl
from rl_megatron.losses.kto import baseline_kl, kto_objective
from rl_megatron.losses.mismatch import rollout_mismatch
from rl_megatron.losses.reward_model import reward_model_objective
from rl_megatron.losses.rollout_is import correct_for_rollout
from rl_megatron.losses.sft import sft_objective

__all__ = [
    "LOSS_AGG_MODES",
    "KLController",
    "KLEstimator",
    "aggregation_weights",
    "baseline_kl",
    "correct_for_rollout",
    "dpo_objective",
    "grpo_objective",
    "kl_penalised_rewards",
    "kto_objective",
    "reward_model_objective",
    "rollout_mismatch",
    "sequence_kl",
    "sft_objective",
    "totals",
]
