"""Find the first option, step and sample in which two runs differ: ``python tools/diff_runs.py RUN_DIR RUN_DIR``.

The runs may be finished, killed or running. Differences in options that only affect how results are computed, such as
the layout, and in the environment are printed as possible causes but not counted.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.config.text import echo
from tools.lib.run_differences import (
    changed_facts,
    changed_options,
    compare_steps,
    read_run,
    report_facts,
    report_options,
    report_samples,
    report_steps,
)

EQUAL, DIFFERENT, UNREADABLE = 0, 1, 2
"""Exit statuses."""


def main(argv: Sequence[str]) -> int:
    """Compare, print a report and return the exit status."""
    command_line = build_parser()
    arguments = command_line.parse_args(argv)
    if not arguments.tolerance >= 0.0:
        command_line.error(f"--tolerance {arguments.tolerance}: must be at least 0")
    try:
        a, b = read_run(arguments.a), read_run(arguments.b)
    except ValueError as error:
        echo(f"diff_runs: {error}", file=sys.stderr)
        return UNREADABLE
    for sentence in (*a.missing, *b.missing):
        echo(f"note: {sentence}", file=sys.stderr)
    options, steps = changed_options(a, b), compare_steps(a, b, arguments.tolerance)
    for line in (*report_options(a, b, options), *report_steps(a, b, steps, arguments.tolerance)):
        echo(line)
    for line in (*report_samples(a, b, steps, arguments.data), *report_facts(changed_facts(a, b))):
        echo(line)
    if not steps.steps:
        return UNREADABLE
    differ = steps.differs_at or steps.digest_differs_at or any(change.counts for change in options)
    return DIFFERENT if differ else EQUAL


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    command_line = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 equal, 1 different, 2 when there is nothing to compare",
    )
    command_line.add_argument("a", type=Path, metavar="RUN_DIR", help="--run-dir of a run")
    command_line.add_argument("b", type=Path, metavar="RUN_DIR", help="--run-dir of the other run")
    command_line.add_argument(
        "--tolerance", type=float, default=0.0, metavar="X", help="allowed relative difference of numbers (0)"
    )
    command_line.add_argument("--no-data", dest="data", action="store_false", help="do not open the data")
    return command_line


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exit quietly when the reader of a pipe closes it
    sys.exit(main(sys.argv[1:]))
