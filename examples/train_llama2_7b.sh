#!/usr/bin/env bash
# Llama 2 7B on 140B tokens; for 64 GPUs.
# [DATA=PREFIX] bash examples/train_llama2_7b.sh [FLAG...]; see train.sh for more variables
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" llama2-7b "$@"
