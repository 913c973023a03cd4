"""Draw timelines as text for terminals, and format the numbers in the headline of every picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT
from megatron.pipeline.simulate import Interval, Timeline

WORDS = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input gradient", WEIGHT: "weight gradient"}
"""Names of the kinds in legends."""

IDLE, EXPOSED = " ", "~"
ANSI = {FORWARD: "44;97", BACKWARD: "45;97", INPUT: "43;30", WEIGHT: "42;30"}
"""Background and foreground colour of each kind, as ANSI codes."""
PLAIN = "\x1b[0m"


def drawn(timeline: Timeline, width: int = 120, color: bool = False, clock: float | None = None) -> str:
    """Return the timeline as lines of ``width`` characters: one per rank, time from left to right.

    An action is its kind and micro-batch, such as ``F12``, padded with ``-`` or truncated; the kind is lower case for
    every second stage of a rank. Idle time is blank, or ``~`` while waiting for a transfer.

    Args:
        timeline: simulated or measured.
        width: characters of a line including the name of the rank, at least 20.
        color: add ANSI colours.
        clock: time that a full line represents, to compare several timelines; default: the makespan.
    """
    names = [f"rank {rank} " for rank in range(len(timeline.intervals))]
    room = max(map(len, names))
    columns = max(20, width) - room
    scale = columns / float(clock or timeline.makespan or 1)
    chunks = chunks_of(timeline)
    rows = (_row(timeline, rank, scale, chunks, color) for rank in range(len(names)))
    return "\n".join(f"{name:{room}}{row}".rstrip() for name, row in zip(names, rows))


def legend(timelines: Sequence[Timeline]) -> str:
    """Return the meaning of the letters that occur in the drawings."""
    kinds = {action.kind for timeline in timelines for rank in timeline.intervals for action, _, _ in rank}
    entries = [f"{kind} {word}" for kind, word in WORDS.items() if kind in kinds]
    if any(max(chunks_of(timeline).values(), default=0) for timeline in timelines):
        entries.append("lower case: every second stage of a rank")
    if any(any(timeline.exposed) for timeline in timelines):
        entries.append(f"{EXPOSED} waits for a transfer")
    return ", ".join(entries)


def headline(timeline: Timeline) -> str:
    """Return makespan, bubble and peak memory in one line."""
    return (
        f"makespan {number(timeline.makespan)}, bubble {timeline.bubble:.1%} "
        f"({timeline.span_bubble:.1%} of the span {number(timeline.span)}), "
        f"peak memory {number(max(timeline.peak_memory, default=0))}"
    )


def number(value: float) -> str:
    """Format with at most four significant digits: ``120``, ``0.3333``."""
    return f"{float(value):.4g}" if abs(value) < 1e4 else f"{float(value):.0f}"


def chunks_of(timeline: Timeline) -> Mapping[int, int]:
    """Return the position of each stage among its rank's stages, from 0."""
    held = [sorted({action.stage for action, _, _ in intervals}) for intervals in timeline.intervals]
    return {stage: chunk for stages in held for chunk, stage in enumerate(stages)}


def _row(timeline: Timeline, rank: int, scale: float, chunks: Mapping[int, int], color: bool) -> str:
    """Draw one rank at ``scale`` characters per unit of time."""
    cells = [IDLE] * round(timeline.makespan * scale)

    def place(start: float, end: float) -> range:
        return range(round((start - timeline.start) * scale), round((end - timeline.start) * scale))

    for wait in timeline.exposed[rank]:
        for column in place(*wait):
            cells[column] = EXPOSED
    for interval in timeline.intervals[rank]:
        at = place(interval.start, interval.end)
        cells[at.start : at.stop] = _cells(interval, len(at), chunks, color)
    return "".join(cells)


def _cells(interval: Interval, length: int, chunks: Mapping[int, int], color: bool) -> Iterator[str]:
    """Yield the characters of one action."""
    stage, kind, microbatch = interval.action
    letter = kind.lower() if chunks[stage] % 2 else kind
    text = f"{letter}{microbatch}"
    text = text.ljust(length, "-") if len(text) <= length else letter.ljust(length, "-")[:length]
    for character in text:
        yield f"\x1b[{ANSI[kind]}m{character}{PLAIN}" if color else character
