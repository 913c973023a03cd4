#!/usr/bin/env bash
# DeepSeek-V3 on 14.8T tokens; for 2,048 GPUs.
# [DATA=PREFIX] bash examples/train_deepseek_v3.sh [FLAG...]; see train.sh for more variables
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" deepseek-v3 "$@"
