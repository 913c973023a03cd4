#!/usr/bin/env bash
# Nemotron 3 Nano 30B-A3B on 660B tokens; for 128 GPUs.
# [DATA=PREFIX] bash examples/train_nemotron_3_nano_30b_a3b.sh [FLAG...]; see train.sh for more variables
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" nemotron-3-nano-30b-a3b "$@"
