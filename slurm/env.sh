# shellcheck shell=bash
# What every job shares; sourced by the sbatch files, in the batch shell, on the first node.
#
# run_job [--restartable] SCRIPT [word ...] starts SCRIPT on all ranks and ends as they ended. It reads
# cluster.env and what Slurm sets; README.md says what each step is for.

set -euo pipefail
# Until there are ranks to pass it on to.
asked=""
trap 'asked=1' USR1
# At what a controller that is busy may not answer.
tries=4

RL_ROOT="${RL_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}"
export RL_ROOT

say() { printf '%s %s\n' "$(date '+%F %T')" "$*"; }
# Code 2: a mistake of the user, which no second attempt can mend.
refuse() { printf '%s\n' "slurm: $*" >&2; exit 2; }

# Settings of the site; what is in the environment already wins. At the top level, because the
# declarations that bring it back would be local in a function.
site="${RL_CLUSTER_ENV:-$RL_ROOT/slurm/cluster.env}"
if [ -e "$site" ]; then
  given="$(export -p)"
  set -a
  # shellcheck source=/dev/null
  . "$site"
  set +a
  eval "$given"
elif [ -n "${RL_CLUSTER_ENV:-}" ]; then
  refuse "RL_CLUSTER_ENV = $site: there is no such file"
fi

# first_host NODELIST: what `scontrol show hostnames` prints first, for where it cannot be asked.
first_host() {
  local list="$1"
  # Each bracket becomes its first index: rack[2-3]n[01-16,20],x -> rack2n01,x
  list="$(sed -E 's/\[([^],-]+)[^]]*\]/\1/g' <<<"$list")"
  printf '%s\n' "${list%%,*}"
}

# The task of an array is named by array and index: the number of its first task names them all.
job_name() {
  if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
    printf '%s_%s\n' "$SLURM_ARRAY_JOB_ID" "$SLURM_ARRAY_TASK_ID"
  else
    printf '%s\n' "$SLURM_JOB_ID"
  fi
}

# The same for all tasks of a job, another for its neighbours; below Linux's ephemeral range.
job_port() { printf '%s\n' $((20000 + (SLURM_JOB_ID + 61 * ${SLURM_ARRAY_TASK_ID:-0}) % 12763)); }

# Unix seconds at which the allocation ends; nothing where that cannot be asked or there is no end.
job_end() {
  local text
  text="$(scontrol -o show job "$(job_name)" 2>/dev/null | sed -nE 's/.* EndTime=([^ ]+).*/\1/p')" || return 0
  date -d "$text" +%s 2>/dev/null || true
}

find_rendezvous() {
  local hosts
  if [ -z "${MASTER_ADDR:-}" ]; then
    hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST" 2>/dev/null)" || hosts=""
    MASTER_ADDR="${hosts%%$'\n'*}"
    [ -n "$MASTER_ADDR" ] || MASTER_ADDR="$(first_host "$SLURM_JOB_NODELIST")"
  fi
  MASTER_PORT="${MASTER_PORT:-$(job_port)}"
  if ! [[ "$MASTER_PORT" =~ ^[0-9]{4,5}$ ]] || [ "$MASTER_PORT" -lt 1024 ] || [ "$MASTER_PORT" -gt 65535 ]; then
    refuse "MASTER_PORT = $MASTER_PORT: must be a port of 1024 to 65535"
  fi
  export MASTER_ADDR MASTER_PORT
}

# Ranks, tasks and CPUs per node, from the launch shape.
find_shape() {
  local given="${SLURM_NTASKS_PER_NODE:-1}" cpus
  RL_LAUNCH="${RL_LAUNCH:-node}"
  RL_RANKS_PER_NODE="${RL_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}"
  [[ "$RL_RANKS_PER_NODE" =~ ^[1-9][0-9]*$ ]] || refuse \
    "RL_GPUS_PER_NODE = '$RL_RANKS_PER_NODE': set it in cluster.env to the GPUs of a node, or give sbatch --gpus-per-node"
  case "$RL_LAUNCH" in
    node)
      tasks_per_node=1
      [ "$given" = 1 ] || refuse "--ntasks-per-node=$given: RL_LAUNCH=node starts one task per node, which starts its" \
        "$RL_RANKS_PER_NODE ranks; give sbatch --ntasks-per-node=1, or set RL_LAUNCH=task" ;;
    task)
      tasks_per_node="$RL_RANKS_PER_NODE"
      [ "$given" = 1 ] || [ "$given" = "$RL_RANKS_PER_NODE" ] || refuse "--ntasks-per-node=$given: RL_LAUNCH=task starts" \
        "one task per GPU; give sbatch --ntasks-per-node=$RL_RANKS_PER_NODE or 1" ;;
    *) refuse "RL_LAUNCH = $RL_LAUNCH: must be node (one task per node) or task (one task per GPU)" ;;
  esac
  # srun does not take --cpus-per-task over from sbatch.
  cpus="${SLURM_CPUS_ON_NODE:-$((${SLURM_CPUS_PER_TASK:-1} * given))}"
  [ "$cpus" -ge "$tasks_per_node" ] || refuse "the job has $cpus CPUs of a node for $tasks_per_node tasks:" \
    "give sbatch --exclusive, or --cpus-per-task"
  export SRUN_CPUS_PER_TASK="${SRUN_CPUS_PER_TASK:-$((cpus / tasks_per_node))}"
  export RL_LAUNCH RL_RANKS_PER_NODE
}

# pyxis's options, in the array `container`.
find_container() {
  container=()
  [ -n "${RL_CONTAINER_IMAGE:-}" ] || return 0
  container=(--container-image="$RL_CONTAINER_IMAGE" --container-workdir="$PWD")
  [ -z "${RL_CONTAINER_MOUNTS:-}" ] || container+=(--container-mounts="$RL_CONTAINER_MOUNTS")
  # Several words, as a command line has them.
  # shellcheck disable=SC2206
  container+=(${RL_CONTAINER_ARGS:-})
}

load_modules() {
  [ -n "${RL_MODULES:-}" ] || return 0
  # `module` is a function of the site's shells, which know nothing of set -u.
  set +eu
  # shellcheck disable=SC2086
  module load $RL_MODULES || refuse "RL_MODULES = $RL_MODULES: module load failed"
  set -eu
}

# The file of the rank that failed first, in $failure; false where there is none.
first_failure() {
  local files=("$RL_STATE_FOLDER"/failure_*)
  failure="${files[0]}"
  [ -e "$failure" ]
}

# For as long as the job goes on: a rank that puts its handlers up only now would miss it otherwise,
# and a controller that is busy does not answer every time.
pass_usr1_on() {
  # A task of which not even node.sh runs yet would die of it.
  local spare="${RL_START_SECONDS:-3}"
  [ $((SECONDS - started)) -ge "$spare" ] || sleep "$spare"
  while kill -0 $$ 2>/dev/null; do
    scancel --signal=USR1 "$job" || true
    sleep "$RL_RETRY_SECONDS"
  done
}

on_usr1() {
  interrupted=1
  if [ -z "$messenger" ]; then
    say "SIGUSR1: the ranks save after their step and end"
    pass_usr1_on &
    messenger=$!
  fi
}

on_term() {
  interrupted=1 ended=1
  say "SIGTERM: Slurm ends this job"
}

# srun cannot end tasks on a node that does not answer, and would wait for it for ever.
end_srun_after_failure() {
  local limit="${RL_END_SECONDS:-60}"
  until first_failure; do sleep 2; done
  sleep "$limit"
  say "a rank failed $limit s ago and other nodes do not answer: the job ends without them"
  kill -KILL "$srun"
}

wait_for_srun() {
  end_srun_after_failure &
  local watcher=$!
  while :; do
    code=0 interrupted=""
    # A trap interrupts it.
    wait "$srun" || code=$?
    [ -n "$interrupted" ] || break
  done
  kill "$watcher" 2>/dev/null || true
}

# srun gives up, with code 1, when the controller is too busy to answer it.
started_nothing() { [ "$code" -eq 1 ] && [ -z "$ended" ] && [ ! -e "$RL_STATE_FOLDER/started" ]; }

# pause_before TRY: nothing before the first one, then longer each time.
pause_before() {
  local seconds=$((($1 - 1) * RL_RETRY_SECONDS))
  [ "$1" -eq 1 ] || say "the controller may be busy: try $1 of $tries in $seconds s"
  sleep "$seconds"
}

# A job that Slurm ends has its own next state: cancelled, or pending again.
may_requeue() {
  [ -z "$ended" ] && return 0
  local state
  state="$(scontrol -o show job "$job" 2>/dev/null | sed -nE 's/.*JobState=([A-Z_]+).*/\1/p')"
  [ "$state" = TIMEOUT ]
}

requeue() {
  local restarts="${SLURM_RESTART_COUNT:-0}" limit="${RL_MAX_RESTARTS:-50}"
  if [ "$restarts" -ge "$limit" ]; then
    say "saved, and not requeued: restarted $restarts times already (RL_MAX_RESTARTS = $limit)"
  elif may_requeue; then
    say "saved: requeued (attempt $((restarts + 2)) follows)"
    # Slurm ends the batch shell and what it runs before the answer is there.
    (trap '' TERM && ask_for_requeue) || say "scontrol requeue failed: start the job again with the same command"
  fi
}

ask_for_requeue() {
  local try
  for ((try = 1; try <= tries; try++)); do
    pause_before "$try"
    scontrol requeue "$job" && return
  done
  return 1
}

run_job() {
  local restartable=() words=() word try
  if [ "$1" = --restartable ]; then restartable=(--restartable); shift; fi
  [ $# -ge 2 ] || refuse "no CONFIG given: sbatch slurm/<job>.sbatch CONFIG [key=value ...]"
  for word in "$@"; do words+=("${word//%a/${SLURM_ARRAY_TASK_ID:-%a}}"); done
  [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || [ "$*" != "${words[*]}" ] || refuse \
    "an array whose tasks are all the same run: write %a where they differ, e.g. seed=%a output_dir=runs/mine/seed_%a"
  RL_RETRY_SECONDS="${RL_RETRY_SECONDS:-10}"
  [[ "$RL_RETRY_SECONDS" =~ ^[0-9]+$ ]] || refuse "RL_RETRY_SECONDS = $RL_RETRY_SECONDS: must be a number of seconds"
  job="$(job_name)" ended="" messenger=""
  load_modules
  find_shape
  find_rendezvous
  find_container
  SLURM_JOB_END_TIME="${SLURM_JOB_END_TIME:-$(job_end)}"
  [ -z "$SLURM_JOB_END_TIME" ] || export SLURM_JOB_END_TIME
  if [ -n "${RL_SOCKET_IFNAME:-}" ]; then
    export NCCL_SOCKET_IFNAME="$RL_SOCKET_IFNAME" GLOO_SOCKET_IFNAME="$RL_SOCKET_IFNAME"
  fi
  export PYTHONPATH="$RL_ROOT${PYTHONPATH:+:$PYTHONPATH}"
  # Of this attempt, on the file system that all nodes share.
  RL_STATE_FOLDER="${RL_STATE_ROOT:-$PWD/runs/slurm}/${job}_${SLURM_RESTART_COUNT:-0}"
  export RL_STATE_FOLDER
  mkdir -p "$RL_STATE_FOLDER"
  # Numbers of jobs begin again on some sites.
  rm -f "$RL_STATE_FOLDER"/failure_* "$RL_STATE_FOLDER"/{requeue,started}
  say "job $job, attempt $((${SLURM_RESTART_COUNT:-0} + 1)): $SLURM_NNODES nodes x $RL_RANKS_PER_NODE ranks on" \
    "$SLURM_JOB_NODELIST, rendezvous $MASTER_ADDR:$MASTER_PORT, launch $RL_LAUNCH"
  started=$SECONDS
  trap on_usr1 USR1
  trap on_term TERM
  for ((try = 1; try <= tries; try++)); do
    pause_before "$try"
    # shellcheck disable=SC2086
    srun --kill-on-bad-exit=1 --wait="${RL_WAIT_SECONDS:-300}" \
      --nodes="$SLURM_NNODES" --ntasks=$((SLURM_NNODES * tasks_per_node)) --ntasks-per-node="$tasks_per_node" \
      "${container[@]}" ${RL_SRUN_ARGS:-} \
      "$RL_ROOT/slurm/node.sh" "${restartable[@]}" "$RL_ROOT/${words[0]}" "${words[@]:1}" &
    srun=$!
    [ -z "$asked" ] || on_usr1
    wait_for_srun
    started_nothing || break
    say "srun has started no task"
  done
  [ -z "$messenger" ] || kill "$messenger" 2>/dev/null || true
  finish
}

# The code of the first rank that failed, whatever srun makes of it and of those it then ended.
finish() {
  if first_failure; then
    code="${failure##*_code_}"
    cat "$failure" >&2
  elif [ "$code" -ne 0 ] && [ -e "$RL_STATE_FOLDER/requeue" ]; then
    code=75
  fi
  [ "$code" -ne 75 ] || requeue
  say "ends with code $code"
  exit "$code"
}
