"""Pretrain a GPT. Run with ``python``, or with torchrun or srun for several processes; see ``--help``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

if __name__ == "__main__":  # until training has handlers of its own; the imports below take a while
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

from megatron.config.errors import UserError
from megatron.config.launch import exit_process, limit_spinning
from megatron.data.errors import DataError
from megatron.training.start import read_start, refuse
from megatron.training.startup import StartupTimer, process_start_time


def main(argv: Sequence[str], about: str = "") -> int:
    """Check the flags, then train.

    Args:
        argv: without the program's name.
        about: docstring of another program, whose ``argv`` begins with ``--config`` and the file of its defaults.

    Returns:
        The exit status: 0 at the end, 1 after an error, 2 if flags or files are refused before the first step,
        124 after ``exit_duration_in_mins``, 128 + n after signal n.
    """
    startup = StartupTimer(process_start_time(), "python")
    startup.enter("flags")
    try:
        start = read_start(argv, about)
    except (UserError, DataError) as error:
        return refuse(error)
    if start.parsed.check_only:
        return start.report(startup.began)
    limit_spinning(os.environ)
    with startup("imports"):
        from megatron.training.main import run  # torch takes seconds to import: only after the flags passed

    startup.enter("other")
    return run(start.parsed.config, start.parsed.notes, startup, start.plan)


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
