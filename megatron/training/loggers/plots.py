"""Plots in the run folder: the loss curve, and heat maps of the health metrics of every layer.

`open_figure` sets the style and replaces the image atomically; other plots use it too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from megatron.checkpoint.durable_files import publish_file
from megatron.training.loggers.console import format_compact, format_exponent, format_plain
from megatron.training.loggers.run_folder import RunHistory, read_json_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INK_COLOR, MUTED_COLOR, GRID_COLOR = "#1f2933", "#7b8794", "#e4e7eb"
TRAIN_COLOR, RATE_COLOR, BATCH_COLOR = "#2563eb", "#0d9488", "#7c3aed"
EVALUATION_COLORS = ("#ea580c", "#15803d", "#be185d", "#a16207", "#0e7490", "#4b5563")  # repeated with other markers
EVALUATION_MARKERS = "osD^v"
SKIPPED_COLOR, RESTART_COLOR, ERROR_COLOR = "#dc2626", "#52606d", "#111827"
FEW_POINTS = 30  # with fewer points, the curve is not smoothed and every point has a marker
STYLE: Any = {
    "font.size": 10,
    "text.color": INK_COLOR,
    "axes.edgecolor": MUTED_COLOR,
    "axes.labelcolor": INK_COLOR,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID_COLOR,
    "xtick.color": MUTED_COLOR,
    "ytick.color": MUTED_COLOR,
    "xtick.labelcolor": INK_COLOR,
    "ytick.labelcolor": INK_COLOR,
    "legend.frameon": False,
}


def draw_loss_curve(history: RunHistory, title: str, out: Path) -> None:
    """Draw loss over tokens (raw faint, smoothed bold, validation as points) above learning rate and batch size.

    Skipped updates, restarts and errors are vertical lines. A log line without a finite loss is a cross at the bottom.
    Raises as :func:`open_figure`.
    """
    with open_figure(out, 9, 5.6) as figure:
        loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
        _draw_loss(loss, history)
        _draw_rate(rate, history)
        skipped = [at for point in history.train for at in point.skipped]
        for axes in (loss, rate):
            _draw_verticals(axes, skipped, "skipped update", SKIPPED_COLOR, "-")
            _draw_verticals(axes, history.restarts, "restart", RESTART_COLOR, "--")
            _draw_verticals(axes, history.errors, "error", ERROR_COLOR, ":")
        last = history.train[-1]
        size = f"{last.iteration:,} steps, {format_compact(last.tokens)} tokens"
        loss.set_title(title, loc="left", fontweight="bold")
        loss.set_title(size, loc="right", color=MUTED_COLOR, fontsize=10)
        loss.set_ylabel("loss per token (nats)")
        label_tokens(rate)
        if handles := loss.get_legend_handles_labels()[0]:
            figure.legend(handles=handles, loc="outside lower left", ncols=3, fontsize=9)


@contextmanager
def open_figure(out: Path, width: float, height: float, grid: bool = True) -> Iterator[Figure]:
    """Yield an empty figure of ``width`` x ``height`` inches, and save it to ``out`` afterwards, atomically.

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
        if out.is_dir():
            raise OSError(f"{out} cannot be written: it is a folder")
        if not out.suffix:  # matplotlib would append one
            raise ValueError(f"{out}: the file name needs an extension: .png, .pdf or .svg")
        image = BytesIO()
        figure.savefig(image, format=out.suffix.removeprefix("."))
        try:
            publish_file(out, image.getvalue())
        except OSError as error:
            raise OSError(f"{out} cannot be written: {error.strerror}") from error


def running_mean(values: np.ndarray, least: int = 0) -> np.ndarray:
    """Return the running mean ``[n]`` of ``values`` ``[n]``. The window grows from 1 at the steep start to n/15.

    ``least`` is the minimum of the largest half width, for small n.
    """
    n = len(values)
    index = np.arange(n)
    half = np.minimum(index // 4, max(n // FEW_POINTS, least))
    low = index - half
    high = np.minimum(index + half, n - 1) + 1
    for _ in range(2):  # the second pass smooths the kinks of the first
        total = np.concatenate([[0.0], np.cumsum(values)])
        values = (total[high] - total[low]) / (high - low)
    return values


def _draw_loss(axes: Axes, history: RunHistory) -> None:
    points = [(p.tokens, p.loss) for p in history.train if np.isfinite(p.loss)]
    if points:
        tokens, losses = np.array(points).T
        axes.plot(tokens, losses, color=TRAIN_COLOR, alpha=0.3, linewidth=0.9)
        smoothed, few = running_mean(losses), len(points) < FEW_POINTS
        last = f"{losses[-1]:.3f}"
        label = f"training: {last}" if few else f"training, smoothed: {smoothed[-1]:.3f} (last raw value {last})"
        axes.plot(tokens, smoothed, color=TRAIN_COLOR, linewidth=2.2, marker="o" * few, markersize=4, label=label)
    evaluated = [p for p in history.evaluations if np.isfinite(p.loss)]
    styles = cycle(product(EVALUATION_MARKERS, EVALUATION_COLORS))
    for name, (mark, color) in zip(dict.fromkeys(p.name for p in evaluated), styles):
        tokens, losses = np.array([(p.tokens, p.loss) for p in evaluated if p.name == name]).T
        axes.plot(tokens, losses, color=color, linewidth=0.8, alpha=0.6)
        label = f"{name}: {losses[-1]:.3f}"
        axes.plot(tokens, losses, mark, color=color, markersize=5, markeredgecolor="white", label=label)
    scale_loss_axis(axes, [loss for _, loss in points] + [p.loss for p in evaluated])
    lost = [p.tokens for p in history.train if not np.isfinite(p.loss)]
    if lost:
        height = axes.get_xaxis_transform()  # x in tokens, y from 0 to 1 over the panel
        label = f"{len(lost)} log line{'' if len(lost) == 1 else 's'} without a finite loss"
        axes.plot(lost, [0.02] * len(lost), "x", color=SKIPPED_COLOR, label=label, transform=height, clip_on=False)


def scale_loss_axis(axes: Axes, losses: list[float]) -> None:
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


def scale_rate_axis(axes: Axes) -> None:
    """Start the learning-rate axis at 0, with labels as on the console."""
    axes.set_ylim(bottom=0)
    axes.margins(y=0.15)
    axes.yaxis.set_major_formatter(lambda value, _: format_exponent(value))


def label_tokens(axes: Axes) -> None:
    """Label the horizontal axis, which counts tokens."""
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_formatter(lambda value, _: format_compact(value, trim=True))


def _draw_rate(axes: Axes, history: RunHistory) -> None:
    tokens = [p.tokens for p in history.train]
    rates = [p.learning_rate for p in history.train]
    axes.plot(tokens, rates, color=RATE_COLOR, linewidth=1.6, marker="o" * (len(tokens) < FEW_POINTS), markersize=3)
    scale_rate_axis(axes)
    axes.set_ylabel("learning rate", color=RATE_COLOR)
    batch = axes.twinx()
    sizes = [p.batch_size for p in history.train]
    starts = [*(p.last_step_from for p in history.train), tokens[-1]]
    batch.step(starts, [*sizes, sizes[-1]], where="post", color=BATCH_COLOR, linewidth=1.2, linestyle="--")
    batch.set_ylim(0, 1.3 * max(sizes))
    batch.set_ylabel("batch size", color=BATCH_COLOR)
    batch.grid(visible=False)


def _draw_verticals(
    axes: Axes, positions: Sequence[float], noun: str, color: str, style: Literal["-", "--", ":"]
) -> None:
    if positions:
        label = f"{len(positions)} {noun}{'' if len(positions) == 1 else 's'}"
        height = axes.get_xaxis_transform()  # x in tokens, y from 0 to 1 over the panel
        lines = axes.vlines(positions, 0, 1, color, linewidth=0.9, alpha=0.7, label=label, transform=height)
        lines.set_linestyle(style)


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

LAYER_METRIC = re.compile(r"health/[^/]+/(?!total$).*")


class HealthMap(NamedTuple):
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
    with open_figure(out, 11, 2.8 * rows, grid=False) as figure:
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
    for line in read_json_lines(metrics):
        if line is None or not isinstance(step := line.get("iteration"), int):
            continue
        if line.get("event") == "start":
            reports = {earlier: report for earlier, report in reports.items() if earlier <= step}
        report = {name: math.nan if x is None else x for name, x in line.items() if LAYER_METRIC.fullmatch(name)}
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


def _draw(figure: Figure, axes: Axes, health: HealthMap) -> None:
    """Draw a heat map with the first layer at the bottom; positive values over a wide range get logarithmic colours."""
    from matplotlib.colors import LogNorm, Normalize

    values = np.ma.masked_invalid(health.values)
    known = values.compressed() if values.count() else np.zeros(1)
    wide = known.min() > 0 and known.max() > 3 * known.min()
    norm = (LogNorm if wide else Normalize)(known.min(), known.max())
    axes.set_facecolor(SKIPPED_COLOR)  # visible where a value is missing or not finite
    columns, rows = np.arange(len(health.steps) + 1), np.arange(len(health.layers) + 1)
    bar = figure.colorbar(axes.pcolormesh(columns, rows, values, norm=norm, cmap="viridis"), ax=axes, pad=0.02)
    ticks = [float(tick) for tick in norm.inverse(np.linspace(0, 1, 4))]
    bar.set_ticks(ticks, labels=[format_plain(tick) for tick in ticks])
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
