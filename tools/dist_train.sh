#!/usr/bin/env bash
# Trains on several GPUs (or, without a GPU, in several processes) of one or more nodes.
# Several nodes: see NNODES, NODE_RANK, MASTER_ADDR and PORT in _torchrun.sh.
set -euo pipefail

if [[ $# -lt 2 ]]; then
    echo "usage: [NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 PORT=29500] $0 CONFIG GPUS [ARGUMENTS of train.py]" >&2
    exit 2
fi
tools="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$tools/_torchrun.sh"

config="$1" gpus="$2"
shift 2
run_distributed "$tools/train.py" "$gpus" "$config" "$@"
