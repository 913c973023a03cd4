"""Pretrain a GPT: ``python pretrain_gpt.py --help``, or under torchrun or srun for several processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron.config.arguments import parse
from megatron.config.problems import UserError


def main(argv: Sequence[str]) -> int:
    """Check the flags, then train; returns the exit status."""
    parsed = parse(argv)
    if parsed.check_only:
        print(parsed.summary())
        return 0
    from megatron.training.main import run  # torch takes seconds to import: only now that the flags are known to be good

    return run(parsed)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"{error}")
