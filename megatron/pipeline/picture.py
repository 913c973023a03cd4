"""Draw timelines with matplotlib: the actions of each rank on a common clock, with its memory below.

matplotlib is imported by the caller that creates the figure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import TYPE_CHECKING

from megatron.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT
from megatron.pipeline.simulate import Interval, Timeline
from megatron.pipeline.terminal import WORDS, chunks_of, headline, number

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {FORWARD: "#17407f", BACKWARD: "#b245d8", INPUT: "#f3c530", WEIGHT: "#35bd8c"}
"""By kind of action; distinguishable with colour blindness and in black and white."""
IDLE, HATCH, INK, MUTED, LIMIT = "#eef0f3", "#4b5563", "#1f2933", "#7b8794", "#dc2626"
PALEST = 0.6
"""Fraction of white mixed into the colour of a rank's last stage; its first stage has none."""

POINTS_PER_INCH = 72
DIGIT = 0.64
"""Width of a digit, as a fraction of the font size."""
LARGEST, SMALLEST = 7.5, 3.5
"""Font size in points of the micro-batch numbers; smaller ones are omitted."""
READABLE = 5.5
"""Font size in points that determines the width of the picture."""
NARROWEST, WIDEST = 9.0, 24.0
MARGIN = 0.9
"""Inches left and right of the panels."""
EDGE = 0.4
"""Points of white around a bar; less for narrow bars."""
LABEL = 2.2
"""Inches of a legend entry."""
ROW, MEMORY, HEADS = 0.21, 0.75, 0.45
"""Inches of a rank, of the memory plot, and of the titles of a panel."""


def size(panels: Mapping[str, Timeline]) -> tuple[float, float]:
    """Return width and height in inches for :func:`draw_figure`, chosen so that two-digit numbers are readable."""
    clock = _clock(panels)
    durations = [float(i.end - i.start) for t in panels.values() for rank in t.intervals for i in rank]
    short = quantiles(durations, n=10)[0] if len(durations) > 1 else clock
    needed = (2 * DIGIT * READABLE + 1.5) / POINTS_PER_INCH * clock / (short or clock)
    width = min(WIDEST, max(NARROWEST, MARGIN + needed))
    return width, 0.9 + sum(_rows(timeline) + MEMORY + HEADS for timeline in panels.values())


def draw(figure: Figure, panels: Mapping[str, Timeline], unit: str = "", limit: float | None = None) -> None:
    """Draw timelines one above the other on one clock, each with the memory of its ranks.

    Bars are numbered by micro-batch; later stages of a rank are paler. Waiting for a transfer is hatched.

    Args:
        figure: to draw on, ideally of :func:`figure_size`.
        panels: by title.
        unit: of time, for the axis.
        limit: of memory, drawn as a line.
    """
    heights = [height for timeline in panels.values() for height in (_rows(timeline), MEMORY)]
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    clock = _clock(panels)
    points = (figure.get_figwidth() - MARGIN) * POINTS_PER_INCH / clock
    for (title, timeline), work, memory in zip(panels.items(), axes[::2], axes[1::2]):
        _draw_work(work, timeline, points)
        _draw_memory(memory, timeline, limit)
        work.set_title(title, loc="left", fontweight="bold", fontsize=10)
        work.set_title(headline(timeline), loc="right", color=MUTED, fontsize=9)
    axes[-1].set_xlim(0, clock)
    axes[-1].set_xlabel(f"time ({unit})" if unit else "time")
    columns = int(figure.get_figwidth() / LABEL)
    figure.legend(handles=_legend(list(panels.values()), limit), loc="outside lower left", ncols=columns, fontsize=9)


def color(kind: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Return the RGB colour, 0 to 1, of actions of ``kind`` in the ``chunk``-th of a rank's ``chunks`` stages."""
    pale = PALEST * chunk / max(1, chunks - 1)
    channels = (int(COLORS[kind][at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (channel + (1 - channel) * pale for channel in channels)
    return red, green, blue


def ink(background: tuple[float, float, float]) -> str:
    """Return white or dark, whichever is more readable on ``background``."""
    red, green, blue = background
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else INK


def _clock(panels: Mapping[str, Timeline]) -> float:
    """Return the longest makespan."""
    return max((float(timeline.makespan) for timeline in panels.values()), default=0) or 1.0


def _rows(timeline: Timeline) -> float:
    """Return the height of all ranks in inches."""
    ranks = len(timeline.intervals)
    return max(0.45, ranks * min(ROW, 24 * ROW / ranks))


def _draw_work(axes: Axes, timeline: Timeline, points: float) -> None:
    """Draw bars and numbers of every rank; a unit of time is ``points`` wide."""
    ranks = len(timeline.intervals)
    chunks = chunks_of(timeline)
    many = max(chunks.values(), default=0) + 1
    height = _rows(timeline) / ranks * POINTS_PER_INCH
    for rank, intervals in enumerate(timeline.intervals):
        axes.broken_barh([(0, float(timeline.makespan))], (rank - 0.45, 0.9), facecolor=IDLE)
        waits = [(float(start - timeline.start), float(end - start)) for start, end in timeline.exposed[rank]]
        axes.broken_barh(waits, (rank - 0.45, 0.9), facecolor="none", edgecolor=HATCH, hatch="//////", linewidth=0)
        alike: dict[tuple[str, int], list[Interval]] = defaultdict(list)
        for interval in intervals:
            alike[interval.action.kind, chunks[interval.action.stage]].append(interval)
        for (kind, chunk), bars in alike.items():
            face = color(kind, chunk, many)
            spans = [(float(bar.start - timeline.start), float(bar.end - bar.start)) for bar in bars]
            edge = min(EDGE, 0.1 * points * min(length for _, length in spans))
            axes.broken_barh(spans, (rank - 0.45, 0.9), facecolor=face, edgecolor="white", linewidth=edge)
            _number(axes, rank, [bar.action.microbatch for bar in bars], spans, points, 0.8 * height, ink(face))
    axes.set_ylim(ranks - 0.5, -0.5)
    named = range(0, ranks, 1 + ranks // 25)
    axes.set_yticks(named, [f"rank {rank}" for rank in named], fontsize=8)
    axes.tick_params(length=0, labelbottom=False)
    axes.spines[:].set_visible(False)


def _number(
    axes: Axes,
    rank: int,
    microbatches: Sequence[int],
    spans: Sequence[tuple[float, float]],
    points: float,
    height: float,
    ink: str,
) -> None:
    """Write the micro-batch into each bar with enough space; ``points`` per unit of time, ``height`` in points."""
    for microbatch, (start, length) in zip(microbatches, spans):
        font = min(LARGEST, height, (length * points - 1) / (DIGIT * len(str(microbatch))))
        if font >= SMALLEST:
            text = axes.text(
                start + length / 2, rank, str(microbatch), fontsize=font, color=ink, ha="center", va="center_baseline"
            )
            text.set_in_layout(False)  # laying out each text would take seconds


def _draw_memory(axes: Axes, timeline: Timeline, limit: float | None) -> None:
    """Plot the memory of each rank over time; early ranks are dark."""
    shades = _shades(len(timeline.intervals))
    for held, shade in zip(timeline.memory, shades):
        after = {float(change.time - timeline.start): float(change.activations + change.weights) for change in held}
        values = [0.0, *after.values()]
        axes.step([0.0, *after, float(timeline.makespan)], [*values, values[-1]], where="post", color=shade)
    peak = float(max(timeline.peak_memory, default=0))
    axes.axhline(peak, color=MUTED, linewidth=0.8, linestyle=":")
    if limit is not None:
        axes.axhline(limit, color=LIMIT, linewidth=1.0, linestyle="--")
    top = max(peak, limit or 0)
    axes.set_ylim(0, 1.15 * top or 1)
    axes.set_yticks([0, peak])
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    axes.set_ylabel("held", fontsize=8)
    axes.tick_params(labelsize=8)


def _shades(ranks: int) -> list[tuple[float, float, float]]:
    """Return one colour per rank, dark to light."""
    dark, light = (0.13, 0.05, 0.35), (0.50, 0.60, 0.93)
    parts = [rank / max(1, ranks - 1) for rank in range(ranks)]
    red, green, blue = ([a + (b - a) * part for part in parts] for a, b in zip(dark, light))
    return list(zip(red, green, blue))


def _legend(timelines: Sequence[Timeline], limit: float | None) -> list[Artist]:
    """Return the legend entries for what occurs in the timelines."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {action.kind for timeline in timelines for rank in timeline.intervals for action, _, _ in rank}
    many = max((chunk for timeline in timelines for chunk in chunks_of(timeline).values()), default=0) + 1
    held = [(kind, word) for kind, word in WORDS.items() if kind in kinds]
    made: list[Artist] = [Patch(color=COLORS[kind], label=f"{kind}: {word}") for kind, word in held]
    if many > 1:
        made.append(Patch(color=color(FORWARD, many - 1, many), label="paler: a rank's later stage"))
    if any(any(timeline.exposed) for timeline in timelines):
        made.append(Patch(facecolor=IDLE, edgecolor=HATCH, hatch="//////", linewidth=0, label="waits for a transfer"))
    last = max(len(timeline.intervals) for timeline in timelines) - 1
    shades = _shades(last + 1)
    made += [Line2D([], [], color=shades[rank], label=f"held by rank {rank}") for rank in sorted({0, last})]
    if limit is not None:
        made.append(Line2D([], [], color=LIMIT, linestyle="--", label=f"limit of memory: {number(limit)}"))
    return made
