#!/usr/bin/env bash
# One task of srun or torchrun, as lib.sh starts them: the agent of a node, or a rank. If LOGS is set, its output goes to
# LOGS/NODE.log or LOGS/NODE-rankN.log, except that of the first node's agent and of rank 0, which is the job's output.
#   slurm/task.sh torchrun OPTION...      slurm/task.sh PROGRAM.py FLAG...
set -euo pipefail
node=${SLURMD_NODENAME:-$(hostname)}
if [ "$1" = torchrun ]; then
    file=$node.log is_first=$([ "$node" != "$HEAD" ] || echo 1)
    export PET_RDZV_ENDPOINT=$HEAD:$MASTER_PORT # as --rdzv-endpoint
else
    rank=${RANK:-$SLURM_PROCID} # from torchrun, else from srun
    file=$node-rank$rank.log is_first=$([ "$rank" != 0 ] || echo 1)
    set -- python -u "$@"
fi
[ -z "${LOGS:-}" ] || [ -n "$is_first" ] || exec >>"$LOGS/$file" 2>&1
exec "$@"
