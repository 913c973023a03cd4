#!/usr/bin/env bash
# Llama 3 70B on 1.4T tokens; for 512 GPUs.
# [DATA=PREFIX] bash examples/train_llama3_70b.sh [FLAG...]; see train.sh for more variables
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" llama3-70b "$@"
