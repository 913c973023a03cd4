"""The loss picture of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron.training.console import compact, exponent
from megatron.training.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
TRAIN, RATE, BATCH = "#2563eb", "#0d9488", "#7c3aed"
EVALUATIONS = ("#ea580c", "#15803d", "#be185d", "#a16207", "#0e7490", "#4b5563")  # then again, with other marks
MARKS = "osD^v"
SKIPPED, RESTART, ERROR = "#dc2626", "#52606d", "#111827"
FEW = 30  # fewer points are not smoothed, and each is marked
STYLE: Any = {
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}


def draw_history(history: History, title: str, out: Path) -> None:
    """Draw loss over tokens (raw faint, smoothed bold, validation as points) above learning rate and batch size.

    Skipped updates, restarts and errors are verticals; where a log line has no finite loss, there is a cross at the
    lower edge. ``out`` is replaced only once the picture is complete.

    Raises:
        ValueError: when matplotlib is missing, or does not know the kind of file ``out`` is named as.
        OSError: when ``out`` cannot be written.
    """
    with picture(out, 9, 5.6) as figure:
        loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
        _draw_loss(loss, history)
        _draw_rate(rate, history)
        skipped = [at for point in history.train for at in point.skipped]
        _draw_verticals((loss, rate), skipped, "skipped update", color=SKIPPED, style="-")
        _draw_verticals((loss, rate), history.restarts, "restart", color=RESTART, style="--")
        _draw_verticals((loss, rate), history.errors, "error", color=ERROR, style=":")
        _label(loss, rate, history, title)
        if handles := loss.get_legend_handles_labels()[0]:
            figure.legend(handles=handles, loc="outside lower left", ncols=3, fontsize=9)


@contextmanager
def picture(out: Path, width: float, height: float, grid: bool = True) -> Iterator[Figure]:
    """A figure to draw on, in inches, which is then saved; ``out`` is replaced only once it is complete.

    Raises:
        ValueError: when matplotlib is missing, or does not know the kind of file ``out`` is named as.
        OSError: when ``out`` cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("drawing needs matplotlib: pip install matplotlib") from error
    with rc_context({**STYLE, "axes.grid": grid}):
        figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
        yield figure
        _save(figure, out)


def _save(figure: Figure, out: Path) -> None:
    if out.is_dir():
        raise OSError(f"{out} cannot be written: it is a folder")
    if not out.suffix:  # matplotlib would write to another name
        raise ValueError(f"{out}: its name does not end with the kind of picture: .png, .pdf or .svg")
    partial = out.with_name(f".partial-{out.name}")
    try:
        figure.savefig(partial)
        os.replace(partial, out)
    except OSError as error:
        raise OSError(f"{out} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def smooth(values: np.ndarray, least: int = 0) -> np.ndarray:
    """A running mean ``[n]`` of ``values`` ``[n]`` whose width grows from 1 at the (steep) start to n/15.

    ``least`` is how many neighbours on either side it takes at the end where n is small.
    """
    n = len(values)
    at = np.arange(n)
    half = np.minimum(at // 4, max(n // FEW, least))
    low, high = at - half, np.minimum(at + half, n - 1) + 1
    for _ in range(2):  # a second pass takes the corners off the first
        total = np.concatenate([[0.0], np.cumsum(values)])
        values = (total[high] - total[low]) / (high - low)
    return values


def _draw_loss(axes: Axes, history: History) -> None:
    points = [(p.tokens, p.loss) for p in history.train if np.isfinite(p.loss)]
    if points:
        tokens, losses = np.array(points).T
        axes.plot(tokens, losses, color=TRAIN, alpha=0.3, linewidth=0.9)
        smoothed, few = smooth(losses), len(points) < FEW
        last = f"{losses[-1]:.3f}"
        label = f"training: {last}" if few else f"training, smoothed: {smoothed[-1]:.3f} (last raw value {last})"
        axes.plot(tokens, smoothed, color=TRAIN, linewidth=2.2, marker="o" * few, markersize=4, label=label)
    evaluated = [p for p in history.evaluations if np.isfinite(p.loss)]
    for number, name in enumerate(dict.fromkeys(p.name for p in evaluated)):
        _draw_evaluations(axes, name, [(p.tokens, p.loss) for p in evaluated if p.name == name], number)
    scale_loss(axes, [loss for _, loss in points] + [p.loss for p in evaluated])
    _mark_lost(axes, [p.tokens for p in history.train if not np.isfinite(p.loss)])


def _draw_evaluations(axes: Axes, name: str, points: Sequence[tuple[int, float]], number: int) -> None:
    """The ``number``-th kind of evaluation, told from the others by its colour, and its marks where these run out."""
    tokens, losses = np.array(points).T
    color, mark = EVALUATIONS[number % len(EVALUATIONS)], MARKS[number // len(EVALUATIONS) % len(MARKS)]
    axes.plot(tokens, losses, color=color, linewidth=0.8, alpha=0.6)
    label = f"{name}: {losses[-1]:.3f}"
    axes.plot(tokens, losses, mark, color=color, markersize=5, markeredgecolor="white", label=label)


def scale_loss(axes: Axes, losses: list[float]) -> None:
    """Make the axis of ``losses`` logarithmic where the first steps would squeeze the others into the lower edge."""
    if not losses or not max(losses) > 3 * min(losses) > 0:
        return
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = min(losses) / 1.05, max(losses) * 1.05
    axes.set_ylim(low, high)
    for steps in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)):
        axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=99))
        if sum(low <= tick <= high for tick in axes.get_yticks()) >= 4:
            break
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def scale_rate(axes: Axes) -> None:
    """Let the axis of learning rates begin at 0, and write them as the console does."""
    axes.set_ylim(bottom=0)
    axes.margins(y=0.15)
    axes.yaxis.set_major_formatter(lambda value, _: exponent(value))


def _mark_lost(axes: Axes, tokens: Sequence[int]) -> None:
    if tokens:
        height = axes.get_xaxis_transform()  # x in tokens, y from 0 to 1 over the panel
        label = f"{len(tokens)} log line{'' if len(tokens) == 1 else 's'} without a finite loss"
        axes.plot(tokens, [0.02] * len(tokens), "x", color=SKIPPED, label=label, transform=height, clip_on=False)


def _draw_rate(axes: Axes, history: History) -> None:
    tokens = [p.tokens for p in history.train]
    few = len(tokens) < FEW
    axes.plot(
        tokens, [p.learning_rate for p in history.train], color=RATE, linewidth=1.6, marker="o" * few, markersize=3
    )
    scale_rate(axes)
    axes.set_ylabel("learning rate", color=RATE)
    batch, sizes = axes.twinx(), [p.batch_size for p in history.train]
    starts = [p.last_step_from for p in history.train]
    batch.step([*starts, tokens[-1]], [*sizes, sizes[-1]], where="post", color=BATCH, linewidth=1.2, linestyle="--")
    batch.set_ylim(0, 1.3 * max(sizes))
    batch.set_ylabel("batch size", color=BATCH)
    batch.grid(visible=False)


def _draw_verticals(
    panels: tuple[Axes, Axes], positions: Sequence[float], noun: str, *, color: str, style: Literal["-", "--", ":"]
) -> None:
    if not positions:
        return
    label = f"{len(positions)} {noun}{'' if len(positions) == 1 else 's'}"
    for axes in panels:
        height = axes.get_xaxis_transform()  # x in tokens, y from 0 to 1 over the panel
        lines = axes.vlines(positions, 0, 1, color, linewidth=0.9, alpha=0.7, label=label, transform=height)
        lines.set_linestyle(style)


def _label(loss: Axes, rate: Axes, history: History, title: str) -> None:
    last = history.train[-1]
    loss.set_title(title, loc="left", fontweight="bold")
    loss.set_title(f"{last.iteration:,} steps, {compact(last.tokens)} tokens", loc="right", color=MUTED, fontsize=10)
    loss.set_ylabel("loss per token (nats)")
    rate.set_xlabel("tokens")
    rate.xaxis.set_major_formatter(lambda value, _: compact(value, trim=True))
