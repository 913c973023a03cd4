"""The picture of several runs side by side."""

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
"""Of the runs after as many as there are colours."""
MARKS = "sD^v"
SIZES = (11.0, 9.0, 7.0, 5.0)
"""Of the points on validation data: hollow, and ever smaller, so that equal ones of several runs are all seen."""
WIDTHS = (4.0, 2.2, 1.6, 1.1)
"""Of the lines, for the same reason."""


class Look(NamedTuple):
    """How one run is told from the others."""

    color: str
    dashes: str
    mark: str
    size: float
    width: float


def draw_runs(runs: Mapping[str, History], out: Path) -> None:
    """Draw the loss of each run over tokens (raw faint, smoothed bold, validation as points) above its learning rate.

    Runs are named by the keys; the number beside a name is the last of its smoothed loss, of short runs too. ``out`` is
    replaced only once the picture is complete.

    Raises:
        ValueError: when matplotlib is missing, or does not know the kind of file ``out`` is named as.
        OSError: when ``out`` cannot be written.
    """
    columns = 1 if max(map(len, runs)) > 40 else 2
    with picture(out, 9, 5.2 + 0.22 * (len(runs) / columns)) as figure:  # the legend stands beneath
        loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3.6, 1))
        for (name, history), look in zip(runs.items(), looks()):
            _draw_loss(loss, name, history, look)
            rate.plot(*_rates(history), color=look.color, linestyle=look.dashes, linewidth=look.width)
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
    """One for each run, all different until the dashes run out."""
    lines = cycle([(color, dashes) for dashes in DASHES for color in COLORS])
    for (color, dashes), (mark, size, width) in zip(lines, cycle(zip(MARKS, SIZES, WIDTHS))):
        yield Look(color, dashes, mark, size, width)


def short_names(folders: Sequence[Path]) -> list[str]:
    """The ends of the paths that tell the folders apart, as short as possible: usually their last parts.

    Raises:
        ValueError: when a folder is given twice.
    """
    paths = [folder.resolve() for folder in folders]
    if twice := [str(folder) for folder, path in zip(folders, paths) if paths.count(path) > 1]:
        raise ValueError(f"{twice[0]} is given twice: give each run once")
    return [_short_name(path, [other for other in paths if other != path]) for path in paths]


def _short_name(path: Path, others: Sequence[Path]) -> str:
    for length in range(1, len(path.parts) + 1):
        end = path.parts[-length:]
        if not any(other.parts[-length:] == end for other in others):
            return str(Path(*end))
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
    """Tokens and losses on the one validation set; runs with several named ones have none in this picture."""
    return [(p.tokens, p.loss) for p in history.evaluations if np.isfinite(p.loss) and p.name == "validation"]


def _finite_losses(history: History) -> list[float]:
    return [p.loss for p in history.train if np.isfinite(p.loss)] + [loss for _, loss in _validation(history)]


def _rates(history: History) -> tuple[list[int], list[float]]:
    return [p.tokens for p in history.train], [p.learning_rate for p in history.train]


def _label(loss: Axes, rate: Axes, histories: Sequence[History]) -> None:
    marks = "; hollow marks: validation" if any(map(_validation, histories)) else ""
    loss.set_title(f"{len(histories)} runs", loc="left", fontweight="bold")
    loss.set_title(f"bold: training loss, smoothed{marks}", loc="right", color=MUTED, fontsize=10)
    loss.set_ylabel("loss per token (nats)")
    rate.set_ylabel("learning rate")
    scale_rate(rate)
    rate.set_xlabel("tokens")
    rate.xaxis.set_major_formatter(lambda value, _: compact(value, trim=True))
