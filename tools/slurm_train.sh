#!/usr/bin/env bash
# Trains under slurm: one torchrun on every node, which starts one process per GPU.
#
# GPUS (8)           GPUs in all
# GPUS_PER_NODE (8)  GPUs of one node
# CPUS_PER_TASK (5)  CPU cores per GPU
# PORT               where the nodes meet; default: from the job's number, so that two jobs on a
#                    node do not collide
# SRUN_ARGS          further arguments of srun, separated by blanks
set -euo pipefail

if [[ $# -lt 4 ]]; then
    echo "usage: [GPUS=16 GPUS_PER_NODE=8] $0 PARTITION JOB_NAME CONFIG WORK_DIR [ARGUMENTS of train.py]" >&2
    exit 2
fi
tools="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
partition="$1" job="$2" config="$3" work_dir="$4"
shift 4

gpus="${GPUS:-8}" per_node="${GPUS_PER_NODE:-8}"
if ((gpus < per_node)); then
    per_node="$gpus"
fi
if ((gpus % per_node)); then
    echo "error: GPUS=$gpus is not a multiple of GPUS_PER_NODE=$per_node" >&2
    exit 2
fi
read -ra srun_args <<<"${SRUN_ARGS:-}"

export TOOLS="$tools" NNODES="$((gpus / per_node))" PER_NODE="$per_node"
# The single quotes matter: node names and ranks are known on the nodes only.
exec srun --partition="$partition" --job-name="$job" \
    --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 \
    --gres="gpu:$per_node" --cpus-per-task="$((per_node * ${CPUS_PER_TASK:-5}))" \
    --kill-on-bad-exit=1 ${srun_args[@]+"${srun_args[@]}"} \
    bash -c '
        set -euo pipefail
        export NODE_RANK="$SLURM_NODEID"
        hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
        read -r first <<<"$hosts"
        export MASTER_ADDR="${MASTER_ADDR:-$first}"
        export PORT="${PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
        config="$1" work_dir="$2"
        shift 2
        exec bash "$TOOLS/dist_train.sh" "$config" "$PER_NODE" --work-dir "$work_dir" "$@"
    ' slurm_train "$config" "$work_dir" "$@"
