"""The picture of a run's health: every quantity as a map of layers over steps."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.training.console import plain
from megatron.training.plot import SKIPPED, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {
    "grad-norm": "gradient norm, before clipping",
    "update-ratio": "update / weight",
    "activation-rms": "activations, root mean square",
    "attention-logit": "largest attention logit",
    "params-norm": "norm of the weights",
    "zeros-share": "share of zeros in the gradient",
    "expert-load": "tokens of the busiest expert / mean",
}
"""By quantity, what stands above its map."""

OF_A_LAYER = re.compile(r"health/[^/]+/(?!total$).*")


@dataclass(frozen=True)
class HealthMap:
    """One quantity: ``values`` ``[layers, steps]``, NaN where there is none."""

    layers: list[str]
    steps: list[int]
    values: np.ndarray


def draw_health(metrics: Path, title: str, out: Path) -> bool:
    """Draw the health reports of a ``metrics.jsonl``; returns whether it holds any. ``out`` is replaced once complete.

    Raises:
        ValueError: when matplotlib is missing, or does not know the kind of file ``out`` is named as.
        OSError: when ``metrics`` cannot be read or ``out`` not be written.
    """
    maps = read_health(metrics)
    if not maps:
        return False
    panels = {kind: label for kind, label in PANELS.items() if kind in maps or kind != "expert-load"}
    rows = -(-len(panels) // 2)
    with picture(out, 11, 2.8 * rows, grid=False) as figure:
        figure.suptitle(f"{title}: health of every layer", x=0.01, ha="left", fontweight="bold")
        places = list(figure.subplots(rows, 2).flat)
        for axes, (kind, label) in zip(places, panels.items()):
            axes.set_title(label, loc="left", fontsize=10)
            if kind in maps:
                _draw(figure, axes, maps[kind])
        for axes in places[len(panels) :]:
            axes.set_axis_off()
    return True


def read_health(metrics: Path) -> dict[str, HealthMap]:
    """The reports that count, by quantity: what a restart threw away is gone.

    Raises:
        OSError: when the file cannot be read.
    """
    reports: dict[int, dict[str, float]] = {}
    for line in _lines(metrics):
        step = line["iteration"]
        if line.get("event") == "start":
            reports = {before: report for before, report in reports.items() if before <= step}
        report = {name: math.nan if x is None else x for name, x in line.items() if OF_A_LAYER.fullmatch(name)}
        if report:
            reports[step] = report
    steps, found = sorted(reports), {}
    for kind in PANELS:
        names = list(dict.fromkeys(n for step in steps for n in reports[step] if n.startswith(f"health/{kind}/")))
        if names:
            values = np.array([[reports[step].get(name, math.nan) for step in steps] for name in names], dtype=float)
            found[kind] = HealthMap([name.rpartition("/")[2] for name in names], steps, values)
    return found


def _lines(metrics: Path) -> Iterator[dict[str, Any]]:
    """Those with a place in the run that can be read: a crash can cut a line off."""
    with metrics.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("iteration"), int):
                yield line


def _draw(figure: Figure, axes: Axes, drawn: HealthMap) -> None:
    """A map with the first layer below; colours are logarithmic where all numbers are positive and far apart."""
    from matplotlib.colors import LogNorm, Normalize

    values = np.ma.masked_invalid(drawn.values)
    known = values.compressed() if values.count() else np.zeros(1)
    wide = known.min() > 0 and known.max() > 3 * known.min()
    norm = (LogNorm if wide else Normalize)(known.min(), known.max())
    axes.set_facecolor(SKIPPED)  # shows through where a number is missing or not finite
    columns, rows = np.arange(len(drawn.steps) + 1), np.arange(len(drawn.layers) + 1)
    bar = figure.colorbar(axes.pcolormesh(columns, rows, values, norm=norm, cmap="viridis"), ax=axes, pad=0.02)
    ticks = [float(tick) for tick in norm.inverse(np.linspace(0, 1, 4))]
    bar.set_ticks(ticks, labels=[plain(tick) for tick in ticks])
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=8)
    named = _named(drawn.layers)
    axes.set_yticks([at + 0.5 for at in named], [drawn.layers[at] for at in named], fontsize=8)
    marked = range(0, len(drawn.steps), -(-len(drawn.steps) // 6))
    axes.set_xticks([at + 0.5 for at in marked], [f"{drawn.steps[at]:,}" for at in marked], fontsize=8)
    axes.set_xlabel("step", fontsize=9)


def _named(layers: list[str]) -> list[int]:
    """The rows whose names are written: all, or every fifth block, tenth..., where there are many."""
    if len(layers) <= 14:
        return list(range(len(layers)))
    stride = next(n for n in (5, 10, 20, 50, 100, len(layers)) if len(layers) // n <= 12)
    numbers = [name.removeprefix("layers.") for name in layers]
    return [at for at, number in enumerate(numbers) if number.isdigit() and int(number) % stride == 0]
