#!/usr/bin/env bash
# A hybrid like Nemotron-H that a laptop trains in minutes, on a tokenizer of 4,096 ids or fewer.
# [DATA=PREFIX] bash examples/train_tiny_hybrid.sh [FLAG...]; see train.sh for more variables
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" tiny-hybrid "$@"
