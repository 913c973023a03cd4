"""Name the first option, step and sample in which two runs differ: ``python tools/diff_runs.py RUN_DIR RUN_DIR``.

Runs may be over, killed or going on. Options that only say how to compute, such as the layout, and the environment are
told, as they may explain a difference, and are none themselves.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.config.problems import UserError
from megatron.data.errors import DataError
from megatron.training.differences import (
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
    """Compare and report; returns the exit status."""
    made = parser()
    arguments = made.parse_args(argv)
    if not arguments.tolerance >= 0.0:
        made.error(f"--tolerance {arguments.tolerance}: must be at least 0")
    try:
        a, b = read_run(arguments.a), read_run(arguments.b)
    except ValueError as error:
        print(f"diff_runs: {error}", file=sys.stderr)
        return UNREADABLE
    for sentence in (*a.missing, *b.missing):
        print(f"note: {sentence}", file=sys.stderr)
    options, steps = changed_options(a, b), compare_steps(a, b, arguments.tolerance)
    for line in (*told_options(a, b, options), *told_steps(a, b, steps, arguments.tolerance)):
        print(line)
    for line in (*told_samples(a, b, steps, arguments.data), *told_facts(changed_facts(a, b))):
        print(line)
    if not steps.steps:
        return UNREADABLE
    differ = steps.differs_at or steps.digest_differs_at or any(change.counts for change in options)
    return DIFFERENT if differ else EQUAL


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 equal, 1 different, 2 when there is nothing to compare",
    )
    made.add_argument("a", type=Path, metavar="RUN_DIR", help="what a run was told with --run-dir")
    made.add_argument("b", type=Path, metavar="RUN_DIR", help="the other run")
    made.add_argument(
        "--tolerance", type=float, default=0.0, metavar="X", help="relative difference that numbers may have (0: none)"
    )
    made.add_argument("--no-data", dest="data", action="store_false", help="do not open the data")
    return made


def told_options(a: RunFolder, b: RunFolder, changes: Sequence[Change]) -> Iterator[str]:
    """Lines on the options."""
    if a.options is None or b.options is None:
        yield "options: not compared, a config.yaml is missing"
        return
    counted = [change for change in changes if change.counts]
    yield f"options: {len(counted)} differ" if counted else "options: equal"
    yield from (f"  {change}" for change in counted)
    yield from (f"  not counted: {change}" for change in changes if not (change.counts or change.of_one_start))
    if rest := [change.name for change in changes if change.of_one_start]:
        yield f"  of one start, not counted: {' '.join(rest)}"


def told_steps(a: RunFolder, b: RunFolder, steps: StepComparison, tolerance: float) -> Iterator[str]:
    """Lines on the log lines."""
    lengths = [max(run.lines, default=0) for run in (a, b)]
    equal = "to the bit" if tolerance == 0.0 else f"to {tolerance:g}"
    last = steps.before(steps.differs_at)
    if not steps.steps:
        yield f"steps: not compared, no log line is of the same step; the last are of {lengths[0]:,} | {lengths[1]:,}"
    elif steps.differs_at is None:
        yield f"steps: equal {equal} up to step {last:,}, in {len(steps.steps):,} log lines"
        if lengths[0] != lengths[1]:
            yield f"  the runs have {lengths[0]:,} | {lengths[1]:,} steps so far"
    else:
        before = f"equal {equal} up to step {last:,}; " if last else ""
        yield f"steps: {before}the log line of step {steps.differs_at:,} is the first that differs"
        yield from (f"  {change}" for change in steps.changes)


def told_samples(a: RunFolder, b: RunFolder, steps: StepComparison, may_open: bool) -> Iterator[str]:
    """Lines on the samples: by the digests in the log lines, and where these differ, or are missing, by the data."""
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
    from megatron.training.sample_streams import first_different_sample

    first = _samples(a, b, equal) if other is not None else 0
    try:
        yield f"samples: {first_different_sample(a, b, first, _samples(a, b, steps.before(None)))}"
    except (DataError, UserError, OSError) as error:
        yield f"samples: not compared one by one: {error}"


def _samples(a: RunFolder, b: RunFolder, step: int) -> int:
    """The samples that both runs had consumed after a step; none after step 0."""
    return min(int(run.lines[step]["consumed-samples"]) for run in (a, b)) if step else 0


def told_facts(changes: Sequence[Change]) -> Iterator[str]:
    """Lines on where the runs were made."""
    yield "environment, source and data: " + ("they differ" if changes else "equal")
    yield from (f"  {change}" for change in changes)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends quietly when nobody reads on
    sys.exit(main(sys.argv[1:]))
