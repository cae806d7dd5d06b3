# Sourced by dist_train.sh and dist_test.sh: run_distributed SCRIPT GPUS ARGUMENTS… on every node.
#
# One node:      nothing to set (a free port is found; PORT fixes it).
# Several nodes: NNODES and MASTER_ADDR, and either NODE_RANK (0 … NNODES-1, one each) or nothing
#                more: without NODE_RANK the nodes find each other (c10d rendezvous) at
#                MASTER_ADDR:PORT, on the machine of that name. RDZV_ID tells two runs apart;
#                LOCAL_ADDR is this node's address, where its host name does not resolve.
# PYTHON:        the interpreter (default: python).
#
# The shell becomes torchrun: a SIGTERM to it, as of a scheduler that takes the machine away, reaches
# the ranks, which have 30 seconds for a checkpoint.

run_distributed() {
    local script="$1" gpus="$2"
    shift 2
    local nnodes="${NNODES:-1}" addr="${MASTER_ADDR:-}" port="${PORT:-29500}"
    local where=()
    if [[ "$nnodes" == 1 ]]; then
        if [[ -n "${PORT:-}" ]]; then
            where=(--nnodes 1 --master-addr "${addr:-127.0.0.1}" --master-port "$port")
        else
            where=(--standalone)
        fi
    elif [[ -z "$addr" ]]; then
        echo "error: NNODES=$nnodes needs MASTER_ADDR, the name of the first node" >&2
        return 2
    elif [[ -n "${NODE_RANK:-}" ]]; then
        if ((NODE_RANK >= nnodes)); then
            echo "error: NODE_RANK=$NODE_RANK is none of 0 to $((nnodes - 1)) of NNODES=$nnodes" >&2
            return 2
        fi
        where=(--nnodes "$nnodes" --node-rank "$NODE_RANK"
            --master-addr "$addr" --master-port "$port")
    else
        where=(--nnodes "$nnodes" --rdzv-backend c10d --rdzv-endpoint "$addr:$port"
            --rdzv-id "${RDZV_ID:-mmvttt}")
        if [[ -n "${LOCAL_ADDR:-}" ]]; then
            where+=(--local-addr "$LOCAL_ADDR")
        fi
    fi
    # Slurm's warning is for the ranks, which save on it; torchrun would end.
    trap '' USR1
    # No module of the working directory stands in for one of torch's.
    export PYTHONSAFEPATH=1
    exec "${PYTHON:-python}" -m torch.distributed.run "${where[@]}" --nproc-per-node "$gpus" \
        "$script" "$@" --launcher pytorch
}
