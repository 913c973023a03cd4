#!/usr/bin/env bash
# GPT-3 175B on 300B tokens; for 1,024 GPUs.
# [DATA=PREFIX] bash examples/train_gpt3_175b.sh [FLAG...]; see train.sh for more variables
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" gpt3-175b "$@"
