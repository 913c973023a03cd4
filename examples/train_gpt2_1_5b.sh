#!/usr/bin/env bash
# GPT-2 1.5B on 30B tokens; for one node of 8 GPUs.
# [DATA=PREFIX] bash examples/train_gpt2_1_5b.sh [FLAG...]; see train.sh for more variables
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" gpt2-1.5b "$@"
