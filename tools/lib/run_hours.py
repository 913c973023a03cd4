"""Where the hours of a run went, from its log over all starts: the parts add up to its wall clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from tools.lib.run_record import RunRecord, Start

PARTS = {
    "training": "steps whose result was kept",
    "skipped": "steps whose update was skipped",
    "evaluation": "evaluations",
    "saving": "saves, as far as training waited for them",
    "start-up": "from the start of the process, or of a rewind, to the first step",
    "other": "reports, callbacks and logging between steps",
    "lost": "logged steps that a restart or a rewind took again",
    "failed": "after the last step of a start that an error ended: a step that failed or stalled",
    "unrecorded": "from the last record of a start that was killed to the next start: its last steps, and waiting",
    "waiting": "from the recorded end of a start to the next one",
}
"""Parts of the time of a run, and what each covers."""

INSIDE = {
    "computing": "what is left of the steps",
    "communication": "waits for other ranks that computing did not hide",
    "bubble": "waits in the pipeline",
    "data": "waits for data",
}
"""Parts of the time of its kept steps, of the mean rank; of data, of the slowest one."""


@dataclass
class RunHours:
    """Seconds of a run by part."""

    # By name of PARTS; they add up to ``total``.
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    # By name of INSIDE, of ``parts["training"]``.
    inside: dict[str, float] = field(default_factory=dict)
    # From the start of the first process to the last record.
    total: float = 0.0
    # Seconds of starts times their ranks.
    rank_seconds: float = 0.0
    # Joules, of all log lines that have them, and tokens of the kept steps among these.
    joules: float = math.nan
    tokens: float = 0.0


def run_hours(record: RunRecord) -> RunHours:
    """Account for the time of a run.

    The first step of a start counts as training, not as start-up. Clocks are those of the records.
    """
    hours = RunHours()
    if not record.starts:
        return hours
    taken = record.column("iteration-time") * steps_of_lines(record)
    share, skips = kept_share(record), skipped_share(record)
    taken = np.where(np.isfinite(taken), taken, 0.0)
    number = record.start_of_line()
    end = began_at(record.starts[0], -math.inf)
    first = end
    before: Start | None = None
    for place, start in enumerate(record.starts):
        begins = max(end, began_at(start, end))
        same_process = before is not None and not before.ending and not start.start_up.get("python")
        continues = same_process and phase(start) != phase(before)
        ending = "" if before is None else before.ending
        gap = "start-up" if continues or ending == "rewind" else "waiting" if ending else "unrecorded"
        hours.parts[gap] += begins - end
        mine = number == place
        _add_start(hours, start, begins, record.column("time")[mine], taken[mine], share[mine], skips[mine])
        end = max(begins, start.end)
        ranks = start.facts.get("world-size")
        hours.rank_seconds += (end - begins) * (ranks if isinstance(ranks, int) else 1)
        before = start
    hours.total = end - first
    _add_inside(hours, record, taken * share * (1 - skips))
    energy = record.column("energy-joules")
    measured = np.isfinite(energy)
    if measured.any():
        hours.joules = float(energy[measured].sum())
        hours.tokens = float((tokens_of_lines(record) * share)[measured].sum())
    return hours


def _add_start(
    hours: RunHours,
    start: Start,
    begins: float,
    times: np.ndarray,
    taken: np.ndarray,
    share: np.ndarray,
    skips: np.ndarray,
) -> None:
    """Add the parts of one start; what is not known is ``other``.

    Args:
        hours: to add to.
        start: the start.
        begins: when it began.
        times: of its log lines ``[lines]``.
        taken: seconds of the steps of each line.
        share: of these that was kept.
        skips: share of the steps of each line whose update was skipped.
    """
    wall = max(begins, start.end) - begins
    kept, lost = float((taken * share).sum()), float((taken * (1 - share)).sum())
    ready = min(start.start_up_time - start.start_up.get("first step", 0.0), begins + wall)
    if not start.start_up and kept + lost:  # the record is lost
        ready = max(start.time, begins)
    parts = {
        "training": float((taken * share * (1 - skips)).sum()),
        "skipped": float((taken * share * skips).sum()),
        "lost": lost,
        "start-up": max(0.0, ready - begins),
        "evaluation": sum(seconds for at, seconds in start.evaluations if at > ready),
        "saving": sum(seconds for at, seconds in start.saves if at > ready),
    }
    if start.ending == "error":
        logged = len(times) > 0 and times[-1] > start.end - 1.0  # the last line is that of the error
        since = float([ready, *times][-2 if logged else -1])
        paused = sum(seconds for at, seconds in (*start.evaluations, *start.saves) if at > since)
        parts["failed"] = max(0.0, start.end - since - paused - logged * float(taken[-1:].sum()))
    known = sum(parts.values())
    if known > wall > 0:  # clocks differ by a little
        parts = {name: seconds * wall / known for name, seconds in parts.items()}
        known = wall
    parts["other"] = wall - known
    for name, seconds in parts.items():
        hours.parts[name] += seconds


def _add_inside(hours: RunHours, record: RunRecord, kept: np.ndarray) -> None:
    """Split the time of the kept steps by what the ranks waited for."""
    seconds = {
        "communication": kept * np.nan_to_num(record.column("communication-share")),
        "bubble": kept * np.nan_to_num(record.column("bubble")),
        "data": kept * np.nan_to_num(record.column("data-wait") / record.column("iteration-time")),
    }
    hours.inside = {name: float(values.sum()) for name, values in seconds.items()}
    hours.inside = {"computing": max(0.0, float(kept.sum()) - sum(hours.inside.values())), **hours.inside}


def began_at(start: Start, earliest: float) -> float:
    """Return when the process of a start began, as far as it is recorded."""
    begun = start.start_up_time - sum(start.start_up.values())
    return max(earliest, min(start.time, begun))


def phase(start: Start | None) -> object:
    """Return the phase of a start; None without phases."""
    return None if start is None else start.facts.get("phase")


def _steps_before(record: RunRecord, name: str) -> np.ndarray:
    """Return the value of a counter before the first step of each log line."""
    values = record.column(name)
    before = np.concatenate([[0.0], values[:-1]])
    for start in record.starts:
        if start.first_line < record.lines:
            before[start.first_line] = start.iteration if name == "iteration" else start.tokens
    return before


def steps_of_lines(record: RunRecord) -> np.ndarray:
    """Return the number of steps that each log line covers, ``[lines]``."""
    return np.maximum(record.column("iteration") - _steps_before(record, "iteration"), 0.0)


def tokens_of_lines(record: RunRecord) -> np.ndarray:
    """Return the number of tokens that each log line covers, ``[lines]``."""
    return np.maximum(record.column("consumed-tokens") - _steps_before(record, "consumed-tokens"), 0.0)


def kept_share(record: RunRecord) -> np.ndarray:
    """Return which share of the steps of each log line no restart has discarded, ``[lines]``."""
    if not record.lines:
        return np.zeros(0)
    limit = np.array(record.limits())[record.start_of_line()]
    steps = steps_of_lines(record)
    kept = np.minimum(limit, record.column("iteration")) - _steps_before(record, "iteration")
    return np.clip(np.divide(kept, steps, out=np.zeros_like(kept), where=steps > 0), 0.0, 1.0)


def skipped_share(record: RunRecord) -> np.ndarray:
    """Return the share of the steps of each log line whose update was skipped, ``[lines]``."""
    steps = steps_of_lines(record)
    skipped = np.nan_to_num(record.column("skipped-iterations-count"))
    return np.clip(np.divide(skipped, steps, out=np.zeros_like(steps), where=steps > 0), 0.0, 1.0)
