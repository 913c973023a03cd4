#!/usr/bin/env bash
# Nemotron-H 8B on 160B tokens; for 64 GPUs.
# [DATA=PREFIX] bash examples/train_nemotron_h_8b.sh [FLAG...]; see train.sh for more variables
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" nemotron-h-8b "$@"
