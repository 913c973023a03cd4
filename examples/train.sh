#!/usr/bin/env bash
# Train a model of examples/configs: [DATA=PREFIX] [GPUS=8] [NODES=1 HEAD=HOST] bash examples/train.sh MODEL [FLAG...]
# DATA is that of --data-path, without it tokens are generated. GPUS of each machine are counted if not given; without
# any, one process computes on the CPU. With NODES, start it on each of them; HEAD is the first. DRY_RUN=1 only prints.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
model=${1:?MODEL is missing: one of $(basename -s .yaml examples/configs/*)} && shift
gpus=${GPUS:-$({ nvidia-smi -L 2>/dev/null || true; } | wc -l)} nodes=${NODES:-1}
launch=(python)
if [ "$gpus" -gt 1 ] || [ "$nodes" -gt 1 ]; then
    launch=(torchrun --nnodes "$nodes" --nproc-per-node "$gpus")
    [ "$nodes" = 1 ] || launch+=(--rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "$model")
fi
data=(--mock-data)
[ -z "${DATA:-}" ] || data=(--data-path "$DATA")
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec ${DRY_RUN:+echo} "${launch[@]}" pretrain_gpt.py --config "examples/configs/$model.yaml" "${data[@]}" \
    --run-dir "runs/$model" --save "runs/$model/checkpoints" "$@"
