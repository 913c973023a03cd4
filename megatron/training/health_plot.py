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

from megatron.training.plot import MUTED, STYLE, save_figure

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
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("drawing needs matplotlib: pip install matplotlib") from error
    with rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(11, 8.4), dpi=150, layout="constrained")
        figure.suptitle(f"{title}: health of every layer", x=0.01, ha="left", fontweight="bold")
        for axes, (kind, label) in zip(figure.subplots(3, 2).flat, PANELS.items()):
            axes.set_title(label, loc="left", fontsize=10)
            if kind in maps:
                _draw(figure, axes, maps[kind])
        save_figure(figure, out)
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
    from matplotlib.colors import LogNorm

    values = np.ma.masked_invalid(drawn.values)
    known = values.compressed()
    wide = known.size > 0 and known.min() > 0 and known.max() > 3 * known.min()
    norm = LogNorm(known.min(), known.max()) if wide else None
    axes.set_facecolor(MUTED)  # shows through where a number is missing or not finite
    edges = np.arange(len(drawn.steps) + 1)
    mesh = axes.pcolormesh(edges, np.arange(len(drawn.layers) + 1), values, norm=norm, cmap="viridis")
    figure.colorbar(mesh, ax=axes, pad=0.02)
    shown = range(0, len(drawn.layers), -(-len(drawn.layers) // 12))
    axes.set_yticks([at + 0.5 for at in shown], [drawn.layers[at] for at in shown], fontsize=8)
    marked = range(0, len(drawn.steps), -(-len(drawn.steps) // 6))
    axes.set_xticks([at + 0.5 for at in marked], [f"{drawn.steps[at]:,}" for at in marked], fontsize=8)
    axes.set_xlabel("step", fontsize=9)
