"""Pretrain a hybrid model, whose layers ``--hybrid-layer-pattern`` names; it is pretrain_gpt.py under another name."""

from __future__ import annotations

import sys

from megatron.config.launch import exit_process
from pretrain_gpt import main

if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
