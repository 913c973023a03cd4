#!/usr/bin/env bash
# GPT-2 774M on 15B tokens; for one node of 8 GPUs.
# [DATA=PREFIX] bash examples/train_gpt2_774m.sh [FLAG...]; see train.sh for more variables
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" gpt2-774m "$@"
