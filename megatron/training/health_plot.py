"""Plot the health metrics of a run: one heat map of layers over steps per quantity."""

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
"""Title of each quantity's heat map."""

OF_A_LAYER = re.compile(r"health/[^/]+/(?!total$).*")


@dataclass(frozen=True)
class HealthMap:
    """One quantity of all layers and steps."""

    layers: list[str]
    steps: list[int]
    values: np.ndarray  # [layers, steps], NaN if missing


def draw_health(metrics: Path, title: str, out: Path) -> bool:
    """Draw the health metrics of a ``metrics.jsonl``; return False if it has none.

    Raises ValueError and OSError as :func:`open_figure`, and OSError if ``metrics`` cannot be read.
    """
    maps = read_health(metrics)
    if not maps:
        return False
    panels = {kind: label for kind, label in PANELS.items() if kind in maps or kind != "expert-load"}
    rows = math.ceil(len(panels) / 2)
    with picture(out, 11, 2.8 * rows, grid=False) as figure:
        figure.suptitle(f"{title}: health of every layer", x=0.01, ha="left", fontweight="bold")
        grid = list(figure.subplots(rows, 2).flat)
        for axes, (kind, label) in zip(grid, panels.items()):
            axes.set_title(label, loc="left", fontsize=10)
            if kind in maps:
                _draw(figure, axes, maps[kind])
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
    return True


def read_health(metrics: Path) -> dict[str, HealthMap]:
    """Read the health metrics by quantity, without steps that a restart discarded."""
    reports: dict[int, dict[str, float]] = {}
    for line in _lines(metrics):
        step = line["iteration"]
        if line.get("event") == "start":
            reports = {earlier: report for earlier, report in reports.items() if earlier <= step}
        report = {name: math.nan if x is None else x for name, x in line.items() if OF_A_LAYER.fullmatch(name)}
        if report:
            reports[step] = report
    steps = sorted(reports)
    maps = {}
    for kind in PANELS:
        names = list(dict.fromkeys(n for step in steps for n in reports[step] if n.startswith(f"health/{kind}/")))
        if names:
            values = np.array([[reports[step].get(name, math.nan) for step in steps] for name in names], dtype=float)
            maps[kind] = HealthMap([name.rpartition("/")[2] for name in names], steps, values)
    return maps


def _lines(metrics: Path) -> Iterator[dict[str, Any]]:
    """Yield the readable lines with an iteration; a crash can cut a line off."""
    with metrics.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("iteration"), int):
                yield line


def _draw(figure: Figure, axes: Axes, health: HealthMap) -> None:
    """Draw a heat map with the first layer at the bottom; positive values over a wide range get logarithmic colours."""
    from matplotlib.colors import LogNorm, Normalize

    values = np.ma.masked_invalid(health.values)
    known = values.compressed() if values.count() else np.zeros(1)
    wide = known.min() > 0 and known.max() > 3 * known.min()
    norm = (LogNorm if wide else Normalize)(known.min(), known.max())
    axes.set_facecolor(SKIPPED)  # visible where a value is missing or not finite
    columns, rows = np.arange(len(health.steps) + 1), np.arange(len(health.layers) + 1)
    bar = figure.colorbar(axes.pcolormesh(columns, rows, values, norm=norm, cmap="viridis"), ax=axes, pad=0.02)
    ticks = [float(tick) for tick in norm.inverse(np.linspace(0, 1, 4))]
    bar.set_ticks(ticks, labels=[plain(tick) for tick in ticks])
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=8)
    labelled_rows = _labelled_rows(health.layers)
    axes.set_yticks([row + 0.5 for row in labelled_rows], [health.layers[row] for row in labelled_rows], fontsize=8)
    labelled = range(0, len(health.steps), math.ceil(len(health.steps) / 6))
    axes.set_xticks([column + 0.5 for column in labelled], [f"{health.steps[i]:,}" for i in labelled], fontsize=8)
    axes.set_xlabel("step", fontsize=9)


def _labelled_rows(layers: list[str]) -> list[int]:
    """Return the rows to label: all of a few layers, else every fifth block, tenth, ..."""
    if len(layers) <= 14:
        return list(range(len(layers)))
    stride = next(n for n in (5, 10, 20, 50, 100, len(layers)) if len(layers) // n <= 12)
    numbers = [name.removeprefix("layers.") for name in layers]
    return [row for row, number in enumerate(numbers) if number.isdigit() and int(number) % stride == 0]
