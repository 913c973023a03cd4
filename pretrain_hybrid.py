"""Pretrain a hybrid model, whose layers ``--hybrid-layer-pattern`` names. It is ``pretrain_gpt.py`` by another name."""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":  # as in pretrain_gpt.py
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

from megatron.config.launch import exit_process
from pretrain_gpt import main

if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
