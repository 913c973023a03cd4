"""Show a simulated or measured pipeline: traces for Perfetto, SVG and PNG pictures, and text for a terminal.

All three read a ``Timeline``, the intervals of every rank on one clock.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from megatron.config.files import TABLE_FILE_BYTES, parse_json, read_small
from megatron.pipeline.actions import BACKWARD, COMPUTE_KINDS, FORWARD, INPUT, WEIGHT, Action, ScheduleError
from megatron.pipeline.simulate import Interval, Timeline, Transfer

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MICROSECONDS = 1e6

_TRACE_COLORS = {FORWARD: "rail_response", BACKWARD: "rail_animation", INPUT: "rail_load", WEIGHT: "rail_idle"}
"""Colour names of Chrome: blue, red, green, orange. Perfetto chooses its own."""


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write ``timeline``, one event per line."""
    metadata = {
        "schedule": timeline.name,
        "ranks": len(timeline.intervals),
        "activation": [float(size) for size in timeline.activation],
        "weight_memory": [float(size) for size in timeline.weight_memory],
    }
    events = ",\n".join(json.dumps(event) for event in _events(timeline))
    text = f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(metadata)},\n"traceEvents": [\n{events}\n]}}\n'
    path.write_text(text, encoding="utf-8")


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, intervals in enumerate(timeline.intervals):
        yield _title("process_name", rank, 0, f"pipeline rank {rank}")
        yield _title("thread_name", rank, 0, "computing")
        for interval in intervals:
            yield _event(interval, rank, 0, _TRACE_COLORS[interval.action.kind]) | {"cat": "compute"}
    for source, target in sorted({(transfer.source, transfer.target) for transfer in timeline.transfers}):
        yield _title("thread_name", source, 1 + target, f"to rank {target}")
    for transfer in timeline.transfers:
        args = {"sent": float(transfer.sent) * _MICROSECONDS, "target": transfer.target}
        yield _event(transfer, transfer.source, 1 + transfer.target, "grey") | {"cat": "transfer", "args": args}


def _title(what: str, rank: int, row: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": row, "args": {"name": text}}


def _event(what: Interval | Transfer, rank: int, row: int, color: str) -> dict[str, Any]:
    start, duration = float(what.start) * _MICROSECONDS, float(what.end - what.start) * _MICROSECONDS
    name = str(what.action)
    return {"ph": "X", "name": name, "pid": rank, "tid": row, "ts": start, "dur": duration, "cname": color}


def read_trace(path: Path) -> Timeline:
    """Read a timeline written by :func:`write_trace`; other events in the file are ignored.

    Raises:
        ScheduleError: if the file is unreadable or not such a timeline, or a rank computes two actions at once.
    """
    try:
        return _timeline(parse_json(read_small(path, TABLE_FILE_BYTES)))
    except (OSError, ValueError) as error:
        reason = str(error)
    except (KeyError, TypeError, AttributeError):
        reason = "it is not a trace of a pipeline"
    raise ScheduleError(
        f"{path} cannot be read as a timeline: {reason}",
        "write one with --profile-pipeline or tools/draw_schedule.py --trace",
    )


def _timeline(content: dict[str, Any]) -> Timeline:
    metadata = content["otherData"]
    intervals: list[list[Interval]] = [[] for _ in range(metadata["ranks"])]
    transfers: list[Transfer] = []
    for event in content["traceEvents"]:
        if event.get("cat") == "compute":
            action, start, end = _read(event)
            if action.kind not in COMPUTE_KINDS or not 0 <= event["pid"] < len(intervals):
                raise ValueError(f"{action} is computed on rank {event['pid']} of {len(intervals)}")
            intervals[event["pid"]].append(Interval(action, start, end))
        elif event.get("cat") == "transfer":
            action, start, end = _read(event)
            sent = event["args"]["sent"] / _MICROSECONDS
            transfers.append(Transfer(action, event["pid"], event["args"]["target"], sent, start, end))
    ordered = tuple(tuple(sorted(rank, key=lambda interval: interval.start)) for rank in intervals)
    for rank, computed in enumerate(ordered):
        for before, after in pairwise(computed):
            if after.start < before.end - 1e-9 * max(1, abs(before.end)):
                began = f"rank {rank} starts {after.action} at {after.start} s"
                raise ValueError(f"{began}, before {before.action} is over")
    sizes = (tuple(metadata[name]) for name in ("activation", "weight_memory"))
    return Timeline(metadata["schedule"], ordered, tuple(transfers), *sizes)


def _read(event: dict[str, Any]) -> tuple[Action, float, float]:
    action = Action.parse(event["name"])
    start, duration = event["ts"] / _MICROSECONDS, event["dur"] / _MICROSECONDS
    if not (math.isfinite(start) and 0 <= duration < math.inf):
        raise ValueError(f"{action} starts at {event['ts']} and takes {event['dur']} microseconds")
    return action, start, start + duration


KIND_NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input gradient", WEIGHT: "weight gradient"}
"""Names of the kinds in legends."""

IDLE_CHAR, EXPOSED_TEXT = " ", "~"
ANSI_COLORS = {FORWARD: "44;97", BACKWARD: "45;97", INPUT: "43;30", WEIGHT: "42;30"}
"""Background and foreground colour of each kind, as ANSI codes."""
ANSI_RESET = "\x1b[0m"


def draw_text(timeline: Timeline, width: int = 120, color: bool = False, clock: float | None = None) -> str:
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
    chunks = chunk_indices(timeline)
    rows = (_row(timeline, rank, scale, chunks, color) for rank in range(len(names)))
    return "\n".join(f"{name:{room}}{row}".rstrip() for name, row in zip(names, rows))


def text_legend(timelines: Sequence[Timeline]) -> str:
    """Return the meaning of the letters that occur in the drawings."""
    kinds = {action.kind for timeline in timelines for rank in timeline.intervals for action, _, _ in rank}
    entries = [f"{kind} {word}" for kind, word in KIND_NAMES.items() if kind in kinds]
    if any(max(chunk_indices(timeline).values(), default=0) for timeline in timelines):
        entries.append("lower case: every second stage of a rank")
    if any(any(timeline.exposed) for timeline in timelines):
        entries.append(f"{EXPOSED_TEXT} waits for a transfer")
    return ", ".join(entries)


def headline(timeline: Timeline) -> str:
    """Return makespan, bubble and peak memory in one line."""
    return (
        f"makespan {format_number(timeline.makespan)}, bubble {timeline.bubble:.1%} "
        f"({timeline.span_bubble:.1%} of the span {format_number(timeline.span)}), "
        f"peak memory {format_number(max(timeline.peak_memory, default=0))}"
    )


def format_number(value: float) -> str:
    """Format with at most four significant digits: ``120``, ``0.3333``."""
    return f"{float(value):.4g}" if abs(value) < 1e4 else f"{float(value):.0f}"


def chunk_indices(timeline: Timeline) -> Mapping[int, int]:
    """Return the position of each stage among its rank's stages, from 0."""
    held = [sorted({action.stage for action, _, _ in intervals}) for intervals in timeline.intervals]
    return {stage: chunk for stages in held for chunk, stage in enumerate(stages)}


def _row(timeline: Timeline, rank: int, scale: float, chunks: Mapping[int, int], color: bool) -> str:
    """Draw one rank at ``scale`` characters per unit of time."""
    cells = [IDLE_CHAR] * round(timeline.makespan * scale)

    def columns(start: float, end: float) -> range:
        return range(round((start - timeline.start) * scale), round((end - timeline.start) * scale))

    for wait in timeline.exposed[rank]:
        for column in columns(*wait):
            cells[column] = EXPOSED_TEXT
    for (stage, kind, microbatch), start, end in timeline.intervals[rank]:
        at = columns(start, end)
        letter = kind.lower() if chunks[stage] % 2 else kind
        text = f"{letter}{microbatch}"
        text = text.ljust(len(at), "-") if len(text) <= len(at) else letter.ljust(len(at), "-")[: len(at)]
        for column, character in zip(at, text):
            cells[column] = f"\x1b[{ANSI_COLORS[kind]}m{character}{ANSI_RESET}" if color else character
    return "".join(cells)


COLORS = {FORWARD: "#17407f", BACKWARD: "#b245d8", INPUT: "#f3c530", WEIGHT: "#35bd8c"}
"""By kind of action; distinguishable with colour blindness and in black and white."""
IDLE_COLOR, HATCH_COLOR, INK_COLOR, MUTED_COLOR, LIMIT_COLOR = "#eef0f3", "#4b5563", "#1f2933", "#7b8794", "#dc2626"
PALEST = 0.6
"""Fraction of white mixed into the colour of a rank's last stage; its first stage has none."""

POINTS_PER_INCH = 72
DIGIT_WIDTH = 0.64
"""Width of a digit, as a fraction of the font size."""
LARGEST_FONT, SMALLEST_FONT = 7.5, 3.5
"""Font size in points of the micro-batch numbers; smaller ones are omitted."""
READABLE_FONT = 5.5
"""Font size in points that determines the width of the picture."""
NARROWEST, WIDEST = 9.0, 24.0
MARGIN = 0.9
"""Inches left and right of the panels."""
EDGE = 0.4
"""Points of white around a bar; less for narrow bars."""
LEGEND_ENTRY_WIDTH = 2.2
"""Inches of a legend entry."""
ROW_HEIGHT, MEMORY_HEIGHT, TITLE_HEIGHT = 0.21, 0.75, 0.45
"""Inches of a rank, of the memory plot, and of the titles of a panel."""


def figure_size(panels: Mapping[str, Timeline]) -> tuple[float, float]:
    """Return width and height in inches for :func:`draw_figure`, chosen so that two-digit numbers are readable."""
    clock = _clock(panels)
    durations = [float(i.end - i.start) for t in panels.values() for rank in t.intervals for i in rank]
    short = quantiles(durations, n=10)[0] if len(durations) > 1 else clock
    needed = (2 * DIGIT_WIDTH * READABLE_FONT + 1.5) / POINTS_PER_INCH * clock / (short or clock)
    width = min(WIDEST, max(NARROWEST, MARGIN + needed))
    return width, 0.9 + sum(_rows(timeline) + MEMORY_HEIGHT + TITLE_HEIGHT for timeline in panels.values())


def draw_figure(figure: Figure, panels: Mapping[str, Timeline], unit: str = "", limit: float | None = None) -> None:
    """Draw timelines one above the other on one clock, each with the memory of its ranks.

    Bars are numbered by micro-batch; later stages of a rank are paler. Waiting for a transfer is hatched.

    Args:
        figure: to draw on, ideally of :func:`figure_size`.
        panels: by title.
        unit: of time, for the axis.
        limit: of memory, drawn as a line.
    """
    heights = [height for timeline in panels.values() for height in (_rows(timeline), MEMORY_HEIGHT)]
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    clock = _clock(panels)
    points = (figure.get_figwidth() - MARGIN) * POINTS_PER_INCH / clock
    for (title, timeline), work, memory in zip(panels.items(), axes[::2], axes[1::2]):
        draw_work(work, timeline, points)
        _draw_memory(memory, timeline, limit)
        work.set_title(title, loc="left", fontweight="bold", fontsize=10)
        work.set_title(headline(timeline), loc="right", color=MUTED_COLOR, fontsize=9)
    axes[-1].set_xlim(0, clock)
    axes[-1].set_xlabel(f"time ({unit})" if unit else "time")
    columns = int(figure.get_figwidth() / LEGEND_ENTRY_WIDTH)
    figure.legend(handles=_legend(list(panels.values()), limit), loc="outside lower left", ncols=columns, fontsize=9)


def action_color(kind: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Return the RGB colour, 0 to 1, of actions of ``kind`` in the ``chunk``-th of a rank's ``chunks`` stages."""
    pale = PALEST * chunk / max(1, chunks - 1)
    channels = (int(COLORS[kind][at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (channel + (1 - channel) * pale for channel in channels)
    return red, green, blue


def _clock(panels: Mapping[str, Timeline]) -> float:
    """Return the longest makespan."""
    return max((float(timeline.makespan) for timeline in panels.values()), default=0) or 1.0


def _rows(timeline: Timeline) -> float:
    """Return the height of all ranks in inches."""
    ranks = len(timeline.intervals)
    return max(0.45, ranks * min(ROW_HEIGHT, 24 * ROW_HEIGHT / ranks))


def draw_work(axes: Axes, timeline: Timeline, points: float) -> None:
    """Draw bars and numbers of every rank; a unit of time is ``points`` wide in the picture."""
    ranks = len(timeline.intervals)
    chunks = chunk_indices(timeline)
    many = max(chunks.values(), default=0) + 1
    height = _rows(timeline) / ranks * POINTS_PER_INCH
    for rank, intervals in enumerate(timeline.intervals):
        axes.broken_barh([(0, float(timeline.makespan))], (rank - 0.45, 0.9), facecolor=IDLE_COLOR)
        waits = [(float(start - timeline.start), float(end - start)) for start, end in timeline.exposed[rank]]
        axes.broken_barh(
            waits, (rank - 0.45, 0.9), facecolor="none", edgecolor=HATCH_COLOR, hatch="//////", linewidth=0
        )
        alike: dict[tuple[str, int], list[Interval]] = defaultdict(list)
        for interval in intervals:
            alike[interval.action.kind, chunks[interval.action.stage]].append(interval)
        for (kind, chunk), bars in alike.items():
            face = action_color(kind, chunk, many)
            spans = [(float(bar.start - timeline.start), float(bar.end - bar.start)) for bar in bars]
            edge = min(EDGE, 0.1 * points * min(length for _, length in spans))
            axes.broken_barh(spans, (rank - 0.45, 0.9), facecolor=face, edgecolor="white", linewidth=edge)
            red, green, blue = face
            ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else INK_COLOR  # the more readable one
            for bar, (start, length) in zip(bars, spans):
                number = str(bar.action.microbatch)
                font = min(LARGEST_FONT, 0.8 * height, (length * points - 1) / (DIGIT_WIDTH * len(number)))
                if font >= SMALLEST_FONT:
                    x = start + length / 2
                    text = axes.text(x, rank, number, fontsize=font, color=ink, ha="center", va="center_baseline")
                    text.set_in_layout(False)  # laying out each text would take seconds
    axes.set_ylim(ranks - 0.5, -0.5)
    named = range(0, ranks, 1 + ranks // 25)
    axes.set_yticks(named, [f"rank {rank}" for rank in named], fontsize=8)
    axes.tick_params(length=0, labelbottom=False)
    axes.spines[:].set_visible(False)


def _draw_memory(axes: Axes, timeline: Timeline, limit: float | None) -> None:
    """Plot the memory of each rank over time; early ranks are dark."""
    shades = _shades(len(timeline.intervals))
    for held, shade in zip(timeline.memory, shades):
        after = {float(change.time - timeline.start): float(change.activations + change.weights) for change in held}
        values = [0.0, *after.values()]
        axes.step([0.0, *after, float(timeline.makespan)], [*values, values[-1]], where="post", color=shade)
    peak = float(max(timeline.peak_memory, default=0))
    axes.axhline(peak, color=MUTED_COLOR, linewidth=0.8, linestyle=":")
    if limit is not None:
        axes.axhline(limit, color=LIMIT_COLOR, linewidth=1.0, linestyle="--")
    top = max(peak, limit or 0)
    axes.set_ylim(0, 1.15 * top or 1)
    axes.set_yticks([0, peak])
    axes.yaxis.set_major_formatter(lambda value, _: format_number(value))
    axes.set_ylabel("held", fontsize=8)
    axes.tick_params(labelsize=8)


def _shades(ranks: int) -> list[tuple[float, float, float]]:
    """Return one colour per rank, dark to light."""
    dark, light = (0.13, 0.05, 0.35), (0.50, 0.60, 0.93)
    parts = [rank / max(1, ranks - 1) for rank in range(ranks)]
    red, green, blue = ([a + (b - a) * part for part in parts] for a, b in zip(dark, light))
    return list(zip(red, green, blue))


def work_legend(timelines: Sequence[Timeline]) -> list[Artist]:
    """Return the legend entries for the bars that occur in the timelines."""
    from matplotlib.patches import Patch

    kinds = {action.kind for timeline in timelines for rank in timeline.intervals for action, _, _ in rank}
    many = max((chunk for timeline in timelines for chunk in chunk_indices(timeline).values()), default=0) + 1
    held = [(kind, word) for kind, word in KIND_NAMES.items() if kind in kinds]
    made: list[Artist] = [Patch(color=COLORS[kind], label=f"{kind}: {word}") for kind, word in held]
    if many > 1:
        made.append(Patch(color=action_color(FORWARD, many - 1, many), label="paler: a rank's later stage"))
    if any(any(timeline.exposed) for timeline in timelines):
        made.append(
            Patch(
                facecolor=IDLE_COLOR, edgecolor=HATCH_COLOR, hatch="//////", linewidth=0, label="waits for a transfer"
            )
        )
    return made


def _legend(timelines: Sequence[Timeline], limit: float | None) -> list[Artist]:
    """Return the legend entries for what occurs in the timelines and in the plots of their memory."""
    from matplotlib.lines import Line2D

    made = work_legend(timelines)
    last = max(len(timeline.intervals) for timeline in timelines) - 1
    shades = _shades(last + 1)
    made += [Line2D([], [], color=shades[rank], label=f"held by rank {rank}") for rank in sorted({0, last})]
    if limit is not None:
        made.append(Line2D([], [], color=LIMIT_COLOR, linestyle="--", label=f"limit of memory: {format_number(limit)}"))
    return made
