"""Plot the loss curve of a run."""

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
EVALUATIONS = ("#ea580c", "#15803d", "#be185d", "#a16207", "#0e7490", "#4b5563")  # repeated with other markers
MARKS = "osD^v"
SKIPPED, RESTART, ERROR = "#dc2626", "#52606d", "#111827"
FEW = 30  # with fewer points, the curve is not smoothed and every point has a marker
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

    Skipped updates, restarts and errors are vertical lines. A log line without a finite loss is a cross at the bottom.
    Raises as :func:`open_figure`.
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
    """Yield an empty figure and save it to ``out`` afterwards. ``out`` is replaced atomically.

    Args:
        out: path of the image.
        width: in inches.
        height: in inches.
        grid: whether to draw grid lines.

    Raises:
        ValueError: if matplotlib is missing, or does not support the file type of ``out``.
        OSError: if ``out`` cannot be written.

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
    if not out.suffix:  # matplotlib would append one
        raise ValueError(f"{out}: the file name needs an extension: .png, .pdf or .svg")
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
    """Return the running mean ``[n]`` of ``values`` ``[n]``. The window grows from 1 at the steep start to n/15.

    Args:
        values: values to smooth.
        least: minimum of the largest half width, for small n.

    """
    n = len(values)
    index = np.arange(n)
    half = np.minimum(index // 4, max(n // FEW, least))
    low = index - half
    high = np.minimum(index + half, n - 1) + 1
    for _ in range(2):  # the second pass smooths the kinks of the first
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
    lost = [p.tokens for p in history.train if not np.isfinite(p.loss)]
    if lost:
        height = axes.get_xaxis_transform()  # x in tokens, y from 0 to 1 over the panel
        label = f"{len(lost)} log line{'' if len(lost) == 1 else 's'} without a finite loss"
        axes.plot(lost, [0.02] * len(lost), "x", color=SKIPPED, label=label, transform=height, clip_on=False)


def _draw_evaluations(axes: Axes, name: str, points: Sequence[tuple[int, float]], number: int) -> None:
    """Draw the ``number``-th kind of evaluation with its own colour and marker."""
    tokens, losses = np.array(points).T
    color, mark = EVALUATIONS[number % len(EVALUATIONS)], MARKS[number // len(EVALUATIONS) % len(MARKS)]
    axes.plot(tokens, losses, color=color, linewidth=0.8, alpha=0.6)
    label = f"{name}: {losses[-1]:.3f}"
    axes.plot(tokens, losses, mark, color=color, markersize=5, markeredgecolor="white", label=label)


def scale_loss(axes: Axes, losses: list[float]) -> None:
    """Make the loss axis logarithmic if high first losses would compress the rest of a linear axis."""
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
    """Start the learning-rate axis at 0, with labels as on the console."""
    axes.set_ylim(bottom=0)
    axes.margins(y=0.15)
    axes.yaxis.set_major_formatter(lambda value, _: exponent(value))


def _draw_rate(axes: Axes, history: History) -> None:
    tokens = [p.tokens for p in history.train]
    few = len(tokens) < FEW
    axes.plot(
        tokens, [p.learning_rate for p in history.train], color=RATE, linewidth=1.6, marker="o" * few, markersize=3
    )
    scale_rate(axes)
    axes.set_ylabel("learning rate", color=RATE)
    batch = axes.twinx()
    sizes = [p.batch_size for p in history.train]
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
