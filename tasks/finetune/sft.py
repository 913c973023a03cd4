"""Fine-tune on conversations: ``tasks/finetune/sft.py --pretrained-checkpoint hf:DIR --chat-data-path FILE.jsonl``.

The flags are those of pretrain_gpt.py, with the defaults in sft.yaml. Data, templates and packing are described in
docs/finetuning.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # if this checkout is not installed

import pretrain_gpt
from megatron.config.launch import exit_process


def main(argv: Sequence[str]) -> int:
    """Check the flags, then train; return the exit status of pretrain_gpt.py."""
    return pretrain_gpt.main(["--config", str(Path(__file__).with_suffix(".yaml")), *argv], __doc__ or "")


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
