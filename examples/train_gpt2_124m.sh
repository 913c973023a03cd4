#!/usr/bin/env bash
# GPT-2 124M on 10B tokens; for one GPU, or 8 with torchrun --nproc-per-node 8.
# [DATA=PREFIX] bash examples/train_gpt2_124m.sh [FLAG...]; see train.sh for more variables
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" gpt2-124m "$@"
