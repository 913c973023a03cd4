#!/usr/bin/env bash
# Three phases like those of Llama 3, in miniature and by two processes: short samples; long samples with another rotary
# base and context parallelism; annealing on another blend. The data are files of this repository.
# bash examples/train_tiny_llama_phases.sh [FLAG...]; see train.sh for more variables
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=runs/tiny-llama-phases
prepare() { # name, files
    [ -e "$out/$1_text_document.idx" ] || python tools/preprocess_data.py --input "${@:2}" \
        --output-prefix "$out/$1" --tokenizer-type ByteTokenizer --append-eod --workers 1
}
prepare docs docs/*.md
prepare code megatron/config/*.py
export GPUS=${GPUS:-2}
exec bash examples/train.sh tiny-llama --phases examples/phases/tiny-llama.yaml --run-dir "$out" \
    --save "$out/checkpoints" --set training.train_iters=null --num-layers 2 --hidden-size 64 --ffn-hidden-size 192 \
    --vocab-size 257 --seq-length 128 --max-position-embeddings 128 --global-batch-size 16 --eval-iters 0 \
    --log-interval 10 --device cpu "$@"
