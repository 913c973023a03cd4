#!/usr/bin/env bash
# GPT-OSS 20B on 72B tokens; for 64 GPUs.
# [DATA=PREFIX] bash examples/train_gpt_oss_20b.sh [FLAG...]; see train.sh for more variables
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" gpt-oss-20b "$@"
