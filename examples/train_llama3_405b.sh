#!/usr/bin/env bash
# Llama 3 405B on 8.1T tokens; for 2,016 GPUs.
# [DATA=PREFIX] bash examples/train_llama3_405b.sh [FLAG...]; see train.sh for more variables
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" llama3-405b "$@"
