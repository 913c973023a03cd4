"""Timelines as text: a drawing for terminals, and the numbers that head every picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT
from megatron.pipeline.simulate import Interval, Timeline

WORDS = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input gradient", WEIGHT: "weight gradient"}
"""What legends call the kinds."""

IDLE, EXPOSED = " ", "~"
ANSI = {FORWARD: "44;97", BACKWARD: "45;97", INPUT: "43;30", WEIGHT: "42;30"}
"""Background and foreground of each kind, as terminals number them."""
PLAIN = "\x1b[0m"


def drawn(timeline: Timeline, width: int = 120, color: bool = False, clock: float | None = None) -> str:
    """The timeline as lines of ``width`` characters: one per rank, time from left to right.

    An action is its kind and micro-batch, such as ``F12``, filled up with ``-``, and cut off where there is no room;
    of every second stage on a rank the kind is in lower case. Idle time is blank, or ``~`` where a transfer is awaited.

    Args:
        timeline: simulated or measured.
        width: characters of a line, names of ranks included; at least 20 are used.
        color: whether to add the colours that terminals understand.
        clock: time that a line stands for, so that several timelines can be compared; default: the makespan.
    """
    names = [f"rank {rank} " for rank in range(len(timeline.intervals))]
    room = max(map(len, names))
    columns = max(20, width) - room
    scale = columns / float(clock or timeline.makespan or 1)
    chunks = chunks_of(timeline)
    rows = (_row(timeline, rank, scale, chunks, color) for rank in range(len(names)))
    return "\n".join(f"{name:{room}}{row}".rstrip() for name, row in zip(names, rows))


def legend(timelines: Sequence[Timeline]) -> str:
    """What the letters of the drawings mean, as far as they are in them."""
    kinds = {action.kind for timeline in timelines for rank in timeline.intervals for action, _, _ in rank}
    told = [f"{kind} {word}" for kind, word in WORDS.items() if kind in kinds]
    told += ["lower case: every second stage of a rank"] * any(max(chunks_of(t).values(), default=0) for t in timelines)
    told += [f"{EXPOSED} waits for a transfer"] * any(any(timeline.exposed) for timeline in timelines)
    return ", ".join(told)


def headline(timeline: Timeline) -> str:
    """Makespan, bubble and peak memory in a line."""
    return (
        f"makespan {number(timeline.makespan)}, bubble {timeline.bubble:.1%} "
        f"({timeline.span_bubble:.1%} of the span {number(timeline.span)}), "
        f"peak memory {number(max(timeline.peak_memory, default=0))}"
    )


def number(value: float) -> str:
    """At most four digits that count: ``120``, ``0.3333``."""
    return f"{float(value):.4g}" if abs(value) < 1e4 else f"{float(value):.0f}"


def chunks_of(timeline: Timeline) -> Mapping[int, int]:
    """Which of its rank's stages each stage is, counted from 0."""
    held = [sorted({action.stage for action, _, _ in intervals}) for intervals in timeline.intervals]
    return {stage: chunk for stages in held for chunk, stage in enumerate(stages)}


def _row(timeline: Timeline, rank: int, scale: float, chunks: Mapping[int, int], color: bool) -> str:
    """What one rank does, at ``scale`` characters for a unit of time."""
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
    """One action in ``length`` characters."""
    stage, kind, microbatch = interval.action
    letter = kind.lower() if chunks[stage] % 2 else kind
    text = f"{letter}{microbatch}"
    text = text.ljust(length, "-") if len(text) <= length else letter.ljust(length, "-")[:length]
    for character in text:
        yield f"\x1b[{ANSI[kind]}m{character}{PLAIN}" if color else character
