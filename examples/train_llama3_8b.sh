#!/usr/bin/env bash
# Llama 3 8B on 160B tokens; for 64 GPUs.
# [DATA=PREFIX] bash examples/train_llama3_8b.sh [FLAG...]; see train.sh for more variables
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" llama3-8b "$@"
