"""Find out whether a run is on the curve of its recipe: ``python tools/compare_run.py RUN_DIR``.

Compares the losses of a run with those that the recipe is expected to have at the same numbers of tokens, and its
memory and time of a step with the predictions of the planner. Losses are means over the steps between log lines, and
are smoothed no further. The run may be finished, killed or running. Does not import torch.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.config.text import echo
from tools.lib.expected_curve import NOT_JUDGED, ON, compare_run, report, to_json

ON_CURVE, OFF_CURVE, NOTHING = 0, 1, 2
"""Exit statuses."""


def main(argv: Sequence[str]) -> int:
    """Compare, print a table and return the exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        compared = compare_run(arguments.run, arguments.expected, arguments.any_data)
    except ValueError as error:
        echo(f"compare_run: {error}", file=sys.stderr)
        return NOTHING
    echo(to_json(compared) if arguments.json else "\n".join(report(compared)))
    return {ON: ON_CURVE, NOT_JUDGED: NOTHING}.get(compared.verdict, OFF_CURVE)


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    command_line = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 on its curve, 1 off it, 2 when there is nothing to compare",
    )
    command_line.add_argument("run", type=Path, metavar="RUN_DIR", help="--run-dir of a run")
    found = "what to compare with (default: of the recipe whose options are nearest to those of the run)"
    command_line.add_argument("--expected", type=Path, metavar="FILE", help=found)
    other = "judge the run although its data are not those of the band"
    command_line.add_argument("--any-data", action="store_true", help=other)
    command_line.add_argument("--json", action="store_true", help="print all numbers as JSON")
    return command_line


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exit quietly when the reader of a pipe closes it
    sys.exit(main(sys.argv[1:]))
