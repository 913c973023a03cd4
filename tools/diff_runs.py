"""Find the first option, step and sample in which two runs differ: ``python tools/diff_runs.py RUN_DIR RUN_DIR``.

The runs may be finished, killed or running. Differences in options that only affect how results are computed, such as
the layout, and in the environment are printed as possible causes but not counted.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `tools` is not an installed package

from megatron.config.errors import UserError
from megatron.data.errors import DataError
from tools.lib.compare_runs import (
    Change,
    RunFolder,
    StepComparison,
    changed_facts,
    changed_options,
    compare_steps,
    read_run,
)

EQUAL, DIFFERENT, UNREADABLE = 0, 1, 2


def main(argv: Sequence[str]) -> int:
    """Compare, print a report and return the exit status."""
    command_line = build_parser()
    arguments = command_line.parse_args(argv)
    if not arguments.tolerance >= 0.0:
        command_line.error(f"--tolerance {arguments.tolerance}: must be at least 0")
    try:
        a, b = read_run(arguments.a), read_run(arguments.b)
    except ValueError as error:
        print(f"diff_runs: {error}", file=sys.stderr)
        return UNREADABLE
    for sentence in (*a.missing, *b.missing):
        print(f"note: {sentence}", file=sys.stderr)
    options, steps = changed_options(a, b), compare_steps(a, b, arguments.tolerance)
    for line in (*report_options(a, b, options), *report_steps(a, b, steps, arguments.tolerance)):
        print(line)
    for line in (*report_samples(a, b, steps, arguments.data), *report_facts(changed_facts(a, b))):
        print(line)
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


def report_options(a: RunFolder, b: RunFolder, changes: Sequence[Change]) -> Iterator[str]:
    """Yield the report on options."""
    if a.options is None or b.options is None:
        yield "options: not compared, a config.yaml is missing"
        return
    counted = [change for change in changes if change.counts]
    yield f"options: {len(counted)} differ" if counted else "options: equal"
    yield from (f"  {change}" for change in counted)
    yield from (f"  not counted: {change}" for change in changes if not (change.counts or change.of_one_start))
    if rest := [change.name for change in changes if change.of_one_start]:
        yield f"  of one start, not counted: {' '.join(rest)}"


def report_steps(a: RunFolder, b: RunFolder, steps: StepComparison, tolerance: float) -> Iterator[str]:
    """Yield the report on log lines."""
    lengths = [max(run.lines, default=0) for run in (a, b)]
    precision = "to the bit" if tolerance == 0.0 else f"to {tolerance:g}"
    last = steps.before(steps.differs_at)
    if not steps.steps:
        yield f"steps: not compared, no log line is of the same step; the last are of {lengths[0]:,} | {lengths[1]:,}"
    elif steps.differs_at is None:
        yield f"steps: equal {precision} up to step {last:,}, in {len(steps.steps):,} log lines"
        if lengths[0] != lengths[1]:
            yield f"  the runs have {lengths[0]:,} | {lengths[1]:,} steps so far"
    else:
        before = f"equal {precision} up to step {last:,}; " if last else ""
        yield f"steps: {before}the log line of step {steps.differs_at:,} is the first that differs"
        yield from (f"  {change}" for change in steps.changes)


def report_samples(a: RunFolder, b: RunFolder, steps: StepComparison, may_open: bool) -> Iterator[str]:
    """Yield the report on samples: by digests of the log lines, or by the data where these differ or are missing."""
    other, equal = steps.digest_differs_at, steps.before(steps.digest_differs_at)
    if not steps.steps:
        return
    if steps.digests and other is None:
        yield f"samples: the same up to step {equal:,}"
        return
    if other is not None:
        yield f"samples: their digests differ from the log line of step {other:,} on"
    if not may_open:
        yield "samples: the data were not opened"
        return
    from tools.lib.compare_runs import first_different_sample

    first = _samples(a, b, equal) if other is not None else 0
    try:
        yield f"samples: {first_different_sample(a, b, first, _samples(a, b, steps.before(None)))}"
    except (DataError, UserError, OSError) as error:
        yield f"samples: not compared one by one: {error}"


def _samples(a: RunFolder, b: RunFolder, step: int) -> int:
    """Return the number of samples that both runs had consumed after a step."""
    return min(int(run.lines[step]["consumed-samples"]) for run in (a, b)) if step else 0


def report_facts(changes: Sequence[Change]) -> Iterator[str]:
    """Yield the report on environment, source and data."""
    yield "environment, source and data: " + ("they differ" if changes else "equal")
    yield from (f"  {change}" for change in changes)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exit quietly when the reader of a pipe closes it
    sys.exit(main(sys.argv[1:]))
