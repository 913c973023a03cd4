#!/usr/bin/env bash
# Mixtral 8x7B on 260B tokens; for 256 GPUs.
# [DATA=PREFIX] bash examples/train_mixtral_8x7b.sh [FLAG...]; see train.sh for more variables
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" mixtral-8x7b "$@"
