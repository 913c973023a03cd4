#!/usr/bin/env bash
# Granite 4.0 H Tiny on 160B tokens; for 64 GPUs.
# [DATA=PREFIX] bash examples/train_granite_4_0_h_tiny.sh [FLAG...]; see train.sh for more variables
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" granite-4.0-h-tiny "$@"
