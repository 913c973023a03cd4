"""Plot the loss curves of several runs in one figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron.training.console import compact
from megatron.training.history import History
from megatron.training.plot import FEW, MUTED, picture, scale_loss, scale_rate, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#2563eb", "#ea580c", "#15803d", "#be185d", "#7c3aed", "#a16207", "#0e7490", "#4b5563")
DASHES = ("-", "--", ":", "-.")
"""Line styles; the next one is used when the colours repeat."""
MARKS = "sD^v"
SIZES = (11.0, 9.0, 7.0, 5.0)
"""Marker sizes of validation points: hollow and decreasing, so that equal points of several runs stay visible."""
WIDTHS = (4.0, 2.2, 1.6, 1.1)
"""Line widths, decreasing for the same reason."""


class Look(NamedTuple):
    """Style of one run."""

    color: str
    dashes: str
    mark: str
    size: float
    width: float


def draw_runs(runs: Mapping[str, History], out: Path) -> None:
    """Draw the loss of each run over tokens (raw faint, smoothed bold, validation as points) above its learning rate.

    The keys are the names of the runs; the legend adds the last smoothed loss. Raises as :func:`open_figure`.
    """
    columns = 1 if max(map(len, runs)) > 40 else 2
    with picture(out, 9, 5.2 + 0.22 * (len(runs) / columns)) as figure:  # the legend is below the axes
        loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3.6, 1))
        for (name, history), look in zip(runs.items(), looks()):
            _draw_loss(loss, name, history, look)
            tokens = [point.tokens for point in history.train]
            rates = [point.learning_rate for point in history.train]
            rate.plot(tokens, rates, color=look.color, linestyle=look.dashes, linewidth=look.width)
        scale_loss(loss, [value for history in runs.values() for value in _finite_losses(history)])
        _label(loss, rate, list(runs.values()))
        figure.legend(
            handles=loss.get_legend_handles_labels()[0],
            loc="outside lower left",
            ncols=columns,
            fontsize=9,
            title="training loss at the end, smoothed",
            title_fontsize=9,
            alignment="left",
        )


def looks() -> Iterator[Look]:
    """Yield one style per run; styles repeat after all colours and line styles are used."""
    lines = cycle([(color, dashes) for dashes in DASHES for color in COLORS])
    for (color, dashes), (mark, size, width) in zip(lines, cycle(zip(MARKS, SIZES, WIDTHS))):
        yield Look(color, dashes, mark, size, width)


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest path suffixes that distinguish the folders. Raise ValueError if a folder is given twice."""
    paths = [folder.resolve() for folder in folders]
    if duplicates := [str(folder) for folder, path in zip(folders, paths) if paths.count(path) > 1]:
        raise ValueError(f"{duplicates[0]} is given twice: give each run once")
    return [_short_name(path, [other for other in paths if other != path]) for path in paths]


def _short_name(path: Path, others: Sequence[Path]) -> str:
    for length in range(1, len(path.parts) + 1):
        suffix = path.parts[-length:]
        if not any(other.parts[-length:] == suffix for other in others):
            return str(Path(*suffix))
    return str(path)


def _draw_loss(axes: Axes, name: str, history: History, look: Look) -> None:
    points = [(p.tokens, p.loss) for p in history.train if np.isfinite(p.loss)]
    color, dashes, mark, size, width = look
    if not points:
        axes.plot([], [], color=color, linestyle=dashes, label=f"{name}: no finite loss")
        return
    tokens, losses = np.array(points).T
    smoothed, dots = smooth(losses, least=1), "o" * (len(points) < FEW)
    axes.plot(tokens, losses, color=color, alpha=0.25, linewidth=0.8, marker=dots, markersize=3)
    axes.plot(tokens, smoothed, color=color, linestyle=dashes, linewidth=width, label=f"{name}: {smoothed[-1]:.3f}")
    if evaluated := _validation(history):
        axes.plot(*np.array(evaluated).T, mark, color=color, markersize=size, fillstyle="none", markeredgewidth=1.5)


def _validation(history: History) -> list[tuple[int, float]]:
    """Return tokens and losses of a run's only validation set; runs with several sets have no points."""
    return [(p.tokens, p.loss) for p in history.evaluations if np.isfinite(p.loss) and p.name == "validation"]


def _finite_losses(history: History) -> list[float]:
    return [p.loss for p in history.train if np.isfinite(p.loss)] + [loss for _, loss in _validation(history)]


def _label(loss: Axes, rate: Axes, histories: Sequence[History]) -> None:
    marks = "; hollow marks: validation" if any(map(_validation, histories)) else ""
    loss.set_title(f"{len(histories)} runs", loc="left", fontweight="bold")
    loss.set_title(f"bold: training loss, smoothed{marks}", loc="right", color=MUTED, fontsize=10)
    loss.set_ylabel("loss per token (nats)")
    rate.set_ylabel("learning rate")
    scale_rate(rate)
    rate.set_xlabel("tokens")
    rate.xaxis.set_major_formatter(lambda value, _: compact(value, trim=True))
