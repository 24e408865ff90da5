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
refuse() {
  local said
  said="slurm: $* ($(hostname))"
  printf '%s\n' "$said" >&2
  # As launch_node.py leaves it: srun's own code is that of the tasks it ends for this one.
  [ ! -d "$RL_STATE_FOLDER" ] || printf '%s\n' "$said" >"$RL_STATE_FOLDER/failure_0_rank_${first_rank}_code_2"
  exit 2
}
[ -d "$RL_STATE_FOLDER" ] || refuse "$RL_STATE_FOLDER is not there: RL_STATE_ROOT must be on a file system that" \
  "every node sees, and among RL_CONTAINER_MOUNTS where there is a container"
: >"$RL_STATE_FOLDER/started"
# A rank takes the GPU of its LOCAL_RANK, among all of the node.
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-}"
[ ${#gpus[@]} -eq 0 ] || [ ${#gpus[@]} -ge "$RL_RANKS_PER_NODE" ] || refuse "$RL_RANKS_PER_NODE ranks a node" \
  "(RL_GPUS_PER_NODE) and CUDA_VISIBLE_DEVICES = $CUDA_VISIBLE_DEVICES: give sbatch --gpus-per-node, not --gpus-per-task"

exec "${RL_PYTHON:-python}" "$RL_ROOT/tools/launch_node.py" \
  --world-size $((SLURM_NNODES * RL_RANKS_PER_NODE)) --ranks-per-node "$RL_RANKS_PER_NODE" \
  --first-rank "$first_rank" --first-local-rank "$first_local_rank" --num-ranks "$num_ranks" "$@"
