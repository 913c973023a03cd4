"""Write the results of a soak as text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from tests.golden.provenance import provenance
from tests.soaking.trials import DETECTION_SECONDS, RECOVERY_SECONDS, Trial


def report(trials: Sequence[Trial], seed: int) -> Iterator[str]:
    """Return the results: a table by kind of fault, then every run."""
    outcomes = [outcome for trial in trials for outcome in trial.outcomes]
    wrong, survived = sum(bool(trial.wrong) for trial in trials), sum(map(_survived, trials))
    starts = sum(trial.starts for trial in trials)
    what = f"{survived} of {len(outcomes)} faults survived in {len(trials)} runs, {starts} starts"
    yield f"{what}, {wrong} wrong: seed {seed}"
    yield provenance()
    late = sum(not outcome.is_in_time for outcome in outcomes)
    yield f"noticed within {DETECTION_SECONDS:.0f} s and training again within {RECOVERY_SECONDS:.0f} s: all but {late}"
    goodput, still = [trial.goodput for trial in trials if trial.goodput], [o.again for o in outcomes if o.again]
    if goodput and still:
        yield (
            f"goodput of these runs, which take seconds undisturbed and are struck every few of them: median "
            f"{statistics.median(goodput):.0%}, worst {min(goodput):.0%}"
        )
        mean = statistics.mean(still)
        yield f"a fault cost {mean:.0f} s until a step was taken again: goodput {1 - mean / 3600:.1%} with one an hour"
    yield ""
    yield from _table(trials)
    yield ""
    yield from (f"{number:>3} {line(trial)}" for number, trial in enumerate(trials))


def _table(trials: Sequence[Trial]) -> Iterator[str]:
    """A line for each kind of fault."""
    yield f"{'seconds until':<50}{'noticed':>16}{'training again':>18}"
    yield f"{'':<30}{'count':>8}{'survived':>12}{'median':>9}{'worst':>8}{'median':>9}{'worst':>8}"
    for kind in sorted({outcome.kind for trial in trials for outcome in trial.outcomes}):
        with_it = [(trial, o) for trial in trials for o in trial.outcomes if o.kind == kind]
        survived = sum(not trial.wrong for trial, _ in with_it)
        times = _times([o.noticed for _, o in with_it]) + _times([o.again for _, o in with_it])
        yield f"{kind:<30}{len(with_it):>8}{survived:>12}{times}"


def _times(seconds: Sequence[float | None]) -> str:
    known = [value for value in seconds if value is not None]
    return f"{statistics.median(known):>9.1f}{max(known):>8.1f}" if known else f"{'never':>17}"


def _survived(trial: Trial) -> int:
    return 0 if trial.wrong else len(trial.outcomes)


def line(trial: Trial) -> str:
    """A run in a line, and more where something was wrong."""
    story = "; ".join(map(str, trial.outcomes))
    end = "\n".join(["WRONG", *trial.wrong]) if trial.wrong else f"same, goodput {trial.goodput:.0%}"
    return f"{trial.setup.name} | {story} | {end}"
