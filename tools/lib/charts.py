"""Charts of a page: SVG that is complete without a script, and the same points as JSON for one that zooms.

The picture stretches to any width. Labels of axes are HTML beside it, so that they stay readable on a narrow screen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from megatron.config.text import format_compact

SIZE = 1000.0
"""Width and height of a picture in its own units."""

MAX_POINTS = 1600
"""Points of a curve; more are thinned to the extremes of as many stretches."""

MERGED = 0.006
"""Marks closer than this share of the width become one."""

MAX_MARKS = 40

FLAG_WIDTH = 15.0
"""Width of a letter above a chart, of `SIZE`."""

MARKS = {
    "restart": ("R", "a later start continued here, from a checkpoint"),
    "skipped": ("S", "the update of a step was left out"),
    "error": ("E", "the run ended with an error"),
    "stopped": ("P", "the run was stopped"),
    "rewind": ("W", "the run went back to a checkpoint"),
    "incident": ("I", "an incident was recorded"),
    "replica": ("L", "an elastic replica was lost, or came back"),
    "phase": ("F", "a phase begins"),
    "batch": ("B", "the batch size changes"),
}
"""Letter and meaning of each kind of mark."""


@dataclass(frozen=True)
class Curve:
    """A curve of a chart."""

    name: str
    x: np.ndarray  # [n], ascending
    y: np.ndarray  # [n], NaN where there is no value
    color: int = 1  # of the palette, 1 to 7
    shape: str = "line"  # line, faint, dashed, dots or steps
    listed: bool = True  # in the legend


@dataclass(frozen=True)
class Mark:
    """Something that happened at a place of the horizontal axis."""

    kind: str  # of MARKS
    x: float
    text: str


@dataclass(frozen=True)
class Chart:
    """Curves over one horizontal axis."""

    name: str
    title: str
    curves: Sequence[Curve]
    # Unit of the values: si, percent, bytes, seconds, or nothing.
    unit: str = ""
    # Whether the vertical axis begins at 0; else it may be logarithmic.
    from_zero: bool = False
    tall: bool = False
    # Sentence below the title.
    note: str = ""
    marks: bool = True  # show what happened
    labels: bool = False  # with its letters


@dataclass(frozen=True)
class Scale:
    """Vertical axis of a chart; logarithmic if ``log``."""

    low: float
    high: float
    log: bool

    @classmethod
    def of(cls, values: np.ndarray, from_zero: bool) -> Scale:
        """Return the axis that shows all finite ``values`` ``[n]``."""
        finite = values[np.isfinite(values)]
        if not len(finite):
            return cls(0.0, 1.0, False)
        low, high = float(finite.min()), float(finite.max())
        log = not from_zero and low > 0 and high > 4 * low
        if log:
            low, high = math.log10(low), math.log10(high)
        elif from_zero:
            low, high = min(low, 0.0), max(high, 0.0)
        room = 0.06 * (high - low) or abs(high) * 0.1 or 0.5
        return cls(low if from_zero and low == 0 else low - room, high + room, log)

    def place(self, values: np.ndarray) -> np.ndarray:
        """Return the height of values in the picture, from 0 at the top; NaN for what has none."""
        with np.errstate(divide="ignore", invalid="ignore"):
            shown = np.log10(values) if self.log else values
            places = SIZE * (1 - (shown - self.low) / (self.high - self.low))
        return np.where(np.isfinite(places), places, np.nan)

    def ticks(self, unit: str) -> list[float]:
        """Return about five round values in a unit."""
        if self.log:
            return log_ticks(self.low, self.high)
        size = byte_unit(self.high)[1] if unit == "bytes" else 1
        low, high = self.low / size, self.high / size
        found = next((t for count in (4, 5, 6) if len(t := round_ticks(low, high, count)) > 2), [])
        return [size * tick for tick in found or round_ticks(low, high, 8)]


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten between two numbers."""
    step = (high - low) / count
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    size = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * 0.999)
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [number * size for number in range(first, min(last, first + 50) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round values between two powers of ten."""
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        found = [f * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for f in factors]
        found = [value for value in found if low <= math.log10(value) <= high]
        if len(found) >= 3:
            break
    return found[:: math.ceil(len(found) / 6)]


def thin(x: np.ndarray, y: np.ndarray, most: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Return at most about ``most`` points: the lowest and the highest of equal stretches, and both ends."""
    if len(x) <= most:
        return x, y
    kept = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), most // 2):
        values = y[part]
        if (lost := ~np.isfinite(values)).any():
            kept.add(int(part[lost.argmax()]))
        if not lost.all():
            kept |= {int(part[np.nanargmin(values)]), int(part[np.nanargmax(values)])}
    order = np.array(sorted(kept))
    return x[order], y[order]


def byte_unit(value: float) -> tuple[str, int]:
    """Return name and bytes of the unit in which a number of bytes is written."""
    return ("GiB", 2**30) if abs(value) >= 2**30 else ("MiB", 2**20)


def value_text(value: float, unit: str) -> str:
    """Return a value with its unit, short."""
    if not math.isfinite(value):
        return "none"
    if unit == "percent":
        return f"{100 * value:.3g}%"
    if unit == "bytes":
        name, size = byte_unit(value)
        return f"{value / size:.4g} {name}"
    if unit == "seconds":
        return f"{value:.3g} s" if value >= 1 or value == 0 else f"{1000 * value:.3g} ms"
    return compact(value) if unit == "si" or abs(value) >= 1e5 else f"{value:.4g}"


def compact(value: float) -> str:
    """Return a number with a suffix for its power of a thousand."""
    return format_compact(value, trim=True) if abs(value) >= 1000 else f"{value:.3g}"


def merge_marks(marks: Sequence[Mark], low: float, high: float) -> list[tuple[Mark, int]]:
    """Return marks with how many of a kind were merged into each, at most about `MAX_MARKS` of a kind."""
    found: list[tuple[Mark, int]] = []
    for kind in dict.fromkeys(mark.kind for mark in marks):
        of_kind = sorted((mark for mark in marks if mark.kind == kind), key=lambda mark: mark.x)
        near = (high - low) * (MERGED if len(of_kind) <= MAX_MARKS else 1 / MAX_MARKS)
        groups: list[list[Mark]] = []
        for mark in of_kind:
            if groups and mark.x - groups[-1][0].x < near:
                groups[-1].append(mark)
            else:
                groups.append([mark])
        found += [(group[0], len(group)) for group in groups]
    return sorted(found, key=lambda pair: pair[0].x)


@dataclass
class ChartBook:
    """The charts of a page, over one horizontal axis."""

    low: float
    high: float
    marks: Sequence[Mark] = ()
    phases: Sequence[tuple[str, float, float]] = ()  # name, first and last place
    axis: str = "tokens"
    data: list[dict[str, Any]] = field(default_factory=list)  # of the script

    def draw(self, chart: Chart) -> Iterator[str]:
        """Yield the figure of a chart; nothing if it has no value."""
        drawn = [curve for curve in chart.curves if np.isfinite(curve.y).any()]
        if not drawn:
            return
        scale = Scale.of(np.concatenate([curve.y for curve in drawn]), chart.from_zero)
        log = " data-log" if scale.log else ""
        yield f'<figure class="chart{" tall" if chart.tall else ""}" id="chart-{chart.name}" tabindex="0"{log}>'
        yield f"<figcaption><b>{escape(chart.title)}</b>"
        yield f'<span class="note">{escape(chart.note)}</span>' if chart.note else ""
        yield from self._legend(chart, drawn)
        yield "</figcaption>"
        shown = merge_marks(self.marks, self.low, self.high) if chart.marks else []
        levels = self._levels(shown) if chart.labels else []
        above = f"--rows:{max(levels, default=0)}"
        yield f'<div class="plot" style="{above}" role="img" aria-label="{escape(self._description(chart, drawn))}">'
        yield f'<svg viewBox="0 0 {SIZE:.0f} {SIZE:.0f}" preserveAspectRatio="none" aria-hidden="true">'
        for number, (_, first, last) in enumerate(self.phases):
            if number % 2:
                left, right = self._x(first), self._x(last)
                yield f'<rect class="phase" x="{left:.1f}" y="0" width="{right - left:.1f}" height="{SIZE:.0f}"/>'
        ticks = scale.ticks(chart.unit)
        heights = scale.place(np.array(ticks, dtype=float))
        yield '<g class="grid">'
        yield from (f'<path d="M0 {y:.1f}H{SIZE:.0f}"/>' for y in heights)
        yield "</g>"
        for mark, _ in shown:
            yield f'<path class="mark {mark.kind}" d="M{self._x(mark.x):.1f} 0V{SIZE:.0f}"/>'
        curves = [self._curve(curve, scale, number) for number, curve in enumerate(drawn)]
        yield from (path for path, _ in curves)
        yield "</svg>"
        yield '<div class="y">'
        yield from (
            f'<span style="top:{y / SIZE * 100:.2f}%">{escape(value_text(tick, chart.unit))}</span>'
            for tick, y in zip(ticks, heights)
        )
        yield '</div><div class="x">'
        for tick in round_ticks(self.low, self.high, 5):
            yield f'<span style="left:{self._x(tick) / SIZE * 100:.2f}%">{compact(tick)}</span>'
        yield "</div>"
        yield from self._flags(shown, levels) if chart.labels else ()
        yield "</div></figure>"
        self.data.append(
            {
                "id": chart.name,
                "unit": chart.unit,
                "log": scale.log,
                "y": [scale.low, scale.high],
                "zero": chart.from_zero,
                "curves": [points for _, points in curves],
            }
        )

    def json(self) -> str:
        """Return the data of the script, safe inside an element of HTML."""
        text = json.dumps({"x": [self.low, self.high], "axis": self.axis, "charts": self.data}, allow_nan=False)
        return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

    def _x(self, value: float) -> float:
        return SIZE * (value - self.low) / (self.high - self.low)

    def _description(self, chart: Chart, drawn: Sequence[Curve]) -> str:
        """Return what the chart shows, for readers of a screen."""
        parts = []
        for curve in drawn:
            finite = curve.y[np.isfinite(curve.y)]
            first, last = (value_text(float(finite[place]), chart.unit) for place in (0, -1))
            parts.append(f"{curve.name} from {first} to {last}")
        return f"{chart.title} over {self.axis}: {'; '.join(parts)}"

    def _legend(self, chart: Chart, drawn: Sequence[Curve]) -> Iterator[str]:
        yield '<span class="legend">'
        for number, curve in enumerate(drawn):
            if curve.listed:
                finite = curve.y[np.isfinite(curve.y)]
                last = escape(value_text(float(finite[-1]), chart.unit))
                key = f'<svg class="key c{curve.color} {curve.shape}" viewBox="0 0 24 10" aria-hidden="true">'
                key += f'<path d="{"M12 5h0" if curve.shape == "dots" else "M1 5H23"}"/></svg>'
                name = f'<label><input type="checkbox" checked data-curve="{number}">{key}{escape(curve.name)}</label>'
                yield f'<span>{name} <output data-value="{number}">{last}</output></span>'
        yield "</span>"

    def _curve(self, curve: Curve, scale: Scale, number: int) -> tuple[str, dict[str, Any]]:
        """Return the SVG of a curve, and its points for the script."""
        x, y = thin(curve.x.astype(float), curve.y.astype(float))
        places, heights = SIZE * (x - self.low) / (self.high - self.low), scale.place(y)
        path, gap = [], True
        for n, (at, height) in enumerate(zip(places.tolist(), heights.tolist())):
            if not math.isfinite(height):
                gap = True
            elif curve.shape == "dots":
                path.append(f"M{at:.2f} {height:.2f}h0")
            elif curve.shape == "steps" and not gap:
                path.append(f"H{at:.2f}V{height:.2f}")
            else:
                alone = gap and not (n + 1 < len(x) and math.isfinite(heights[n + 1]))
                path.append(f"{'M' if gap else 'L'}{at:.2f} {height:.2f}{'h0' * alone}")
                gap = False
        element = f'<path class="curve c{curve.color} {curve.shape}" data-curve="{number}" d="{"".join(path)}"/>'
        values = [float(f"{v:.6g}") if math.isfinite(v) else None for v in y.tolist()]
        return element, {"x": [float(f"{v:.9g}") for v in x.tolist()], "y": values}

    def _levels(self, shown: Sequence[tuple[Mark, int]]) -> list[int]:
        """Return the row above the chart of each letter: the lowest with place for it."""
        levels, rows = list[int](), list[float]()  # place of the last letter of each row
        for mark, _ in shown:
            place = self._x(mark.x)
            level = next((n for n, last in enumerate(rows) if place - last >= FLAG_WIDTH), len(rows))
            rows[level : level + 1] = [place]
            levels.append(level)
        return levels

    def _flags(self, shown: Sequence[tuple[Mark, int]], levels: Sequence[int]) -> Iterator[str]:
        """Yield the letters above the marks, which show their texts."""
        yield '<div class="flags">'
        for (mark, count), level in zip(shown, levels):
            text = mark.text if count == 1 else f"{count} of: {mark.text}"
            style = f"left:{self._x(mark.x) / SIZE * 100:.3f}%;--level:{level}"
            yield f'<span class="flag {mark.kind}" data-x="{mark.x:.0f}" style="{style}" title="{escape(text)}">'
            yield f"{MARKS[mark.kind][0]}</span>"
        for name, first, last in self.phases:
            left = f"{self._x((first + last) / 2) / SIZE * 100:.3f}%"
            yield f'<span class="name" data-x="{(first + last) / 2:.0f}" style="left:{left}">{escape(name)}</span>'
        yield "</div>"
