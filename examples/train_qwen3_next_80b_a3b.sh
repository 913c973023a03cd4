#!/usr/bin/env bash
# Qwen3-Next 80B-A3B on 660B tokens; for 256 GPUs.
# [DATA=PREFIX] bash examples/train_qwen3_next_80b_a3b.sh [FLAG...]; see train.sh for more variables
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" qwen3-next-80b-a3b "$@"
