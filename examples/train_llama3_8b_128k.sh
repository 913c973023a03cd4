#!/usr/bin/env bash
# Extend the context of Llama 3 8B to 131,072 tokens, on 4B tokens; for 64 GPUs. LOAD: its checkpoint, or hf:FOLDER.
# LOAD=hf:FOLDER [DATA=PREFIX] bash examples/train_llama3_8b_128k.sh [FLAG...]; see train.sh for more variables
set -euo pipefail
load=()
[ -z "${LOAD:-}" ] || load=(--load "$LOAD" --resume-mode weights-only)
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" llama3-8b "${load[@]}" --run-dir runs/llama3-8b-128k \
    --save runs/llama3-8b-128k/checkpoints --seq-length 131072 --max-position-embeddings 131072 \
    --global-batch-size 32 --train-iters 1000 --lr 3e-5 --min-lr 3e-6 --tensor-model-parallel-size 4 \
    --context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4 "$@"
