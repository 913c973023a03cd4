#!/usr/bin/env bash
# Qwen3 30B-A3B on 660B tokens; for 128 GPUs.
# [DATA=PREFIX] bash examples/train_qwen3_30b_a3b.sh [FLAG...]; see train.sh for more variables
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" qwen3-30b-a3b "$@"
