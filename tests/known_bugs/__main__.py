"""Run the tests of all known bugs, and write their page: ``python -m tests.known_bugs``.

Takes a minute on two cores, and writes docs/known_bugs.md and the number in README.md. ``--only NAME`` runs some of
them and writes nothing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tests.distributed.detect import TOLERANCE, Detector, trains_like_one_process
from tests.kit.cases import compare_with_twin
from tests.kit.pool import Pool
from tests.known_bugs.bugs import BUGS
from tests.known_bugs.page import PAGE, Outcome, page_of
from tests.known_bugs.test_known_bugs import run_with_bug
from tools.lib.verify_parallel import StepDeviation, join_traces

README = PAGE.parents[1] / "README.md"
QUANTITIES = {"loss": "loss {}", "grad_norm": "norm {}", "gradient": "gradient of `{name}` {}"}


def deviations(detector: Detector, ranks: Sequence[Any]) -> list[StepDeviation]:
    """Return the errors of all quantities of training steps; none for a detector of other things."""
    right = detector.right
    if not (isinstance(right, partial) and right.func is trains_like_one_process):
        return []
    (case,) = right.args
    return compare_with_twin([join_traces(step) for step in zip(*ranks)], case)


def largest(detector: Detector, ranks: Sequence[Any]) -> str:
    """Return the largest error, as text."""
    errors = [deviation.error for deviation in deviations(detector, ranks)] or _numbers(ranks)
    return "–" if not errors else f"{max(errors):.0e}" if max(errors) else "0"


def _numbers(ranks: Sequence[Any]) -> list[float]:
    """Return the results of ranks that are errors themselves."""
    return [result for result in ranks if isinstance(result, float)]


def distances(detector: Detector, ranks: Sequence[Any]) -> str:
    """Return the errors of loss, norm and the farthest gradient that exceed the tolerance, as text."""
    found, texts = deviations(detector, ranks), [f"off by {error:.2g}" for error in _numbers(ranks)[:1]]
    for kind, text in QUANTITIES.items():
        worst = max((d for d in found if d.kind == kind), key=lambda d: d.error, default=None)
        if worst is not None and worst.error > TOLERANCE:
            texts.append(text.format(f"{worst.error:.2g}", name=worst.name))
    return ", ".join(texts) or "not equal"


def run(pool: Pool, name: str) -> Outcome:
    """Run the test of a bug without and with the bug."""
    detector = BUGS[name].detector

    def ranks(job: Callable[..., Any], *arguments: Any) -> list[Any]:
        return pool.run(detector.world_size, job, *arguments)

    clean, planted = ranks(detector.function, *detector.args), ranks(run_with_bug, name)
    absent, noticed = detector.right(clean), not detector.right(planted)
    outcome = Outcome(absent, noticed, largest(detector, clean), distances(detector, planted))
    found = "absent" if absent else "PRESENT"
    print(f"{name}: {found}; with the bug planted: {outcome.planted if noticed else 'NOT NOTICED'}", flush=True)
    return outcome


def main() -> None:
    """Run the command line."""
    kinds = dict.fromkeys(bug.kind for bug in BUGS.values())
    names = "\n".join(f"{kind}:\n  " + "\n  ".join(n for n in BUGS if BUGS[n].kind == kind) for kind in kinds)
    parser = argparse.ArgumentParser(
        "python -m tests.known_bugs",
        description=__doc__,
        epilog=f"names, in the order of the page:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=BUGS, default=(), metavar="NAME")
    names = parser.parse_args().only
    with Pool() as pool:
        outcomes = {name: run(pool, name) for name in names or BUGS}
    if not names:
        PAGE.write_text(page_of(outcomes))
        absent = f"{sum(outcome.absent for outcome in outcomes.values())} of {len(outcomes)} absent"
        README.write_text(re.sub(r"\d+ of \d+ absent", absent, README.read_text()))
    raise SystemExit(not all(outcome.absent and outcome.noticed for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
