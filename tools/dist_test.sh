#!/usr/bin/env bash
# Evaluates a checkpoint on several GPUs (or, without a GPU, in several processes).
# Several nodes: see NNODES, NODE_RANK, MASTER_ADDR and PORT in _torchrun.sh.
set -euo pipefail

if [[ $# -lt 3 ]]; then
    echo "usage: [NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 PORT=29500] $0 CONFIG CHECKPOINT GPUS [ARGUMENTS of test.py]" >&2
    exit 2
fi
tools="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$tools/_torchrun.sh"

config="$1" checkpoint="$2" gpus="$3"
shift 3
run_distributed "$tools/test.py" "$gpus" "$config" "$checkpoint" "$@"
