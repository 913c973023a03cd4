#!/usr/bin/env bash
# GPT-2 355M on 10B tokens; for one node of 8 GPUs.
# [DATA=PREFIX] bash examples/train_gpt2_355m.sh [FLAG...]; see train.sh for more variables
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" gpt2-355m "$@"
