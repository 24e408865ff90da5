#!/usr/bin/env bash
# One task of a job, on its own node: env.sh starts it with srun. What differs between tasks is read
# here and not in the batch shell, where SLURM_NODEID and SLURM_PROCID are those of the batch shell.
#
#   node.sh [--restartable] SCRIPT [word ...]
set -euo pipefail
# What is ignored stays so until the launcher has its handlers up.
trap '' USR1 USR2

case "$RL_LAUNCH" in
  node) first_rank=$((SLURM_NODEID * RL_RANKS_PER_NODE)) num_ranks="$RL_RANKS_PER_NODE" first_local_rank=0 ;;
  task) first_rank="$SLURM_PROCID" num_ranks=1 first_local_rank="$SLURM_LOCALID" ;;
esac
exec "${RL_PYTHON:-python}" "$RL_ROOT/tools/launch_node.py" \
  --world-size $((SLURM_NNODES * RL_RANKS_PER_NODE)) --ranks-per-node "$RL_RANKS_PER_NODE" \
  --first-rank "$first_rank" --first-local-rank "$first_local_rank" --num-ranks "$num_ranks" "$@"
