"""Plots of runs: the loss curve of one run or of several, and heat maps of the health metrics of every layer.

`open_figure` sets the style and replaces the image atomically; other plots use it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.checkpoint.durable_files import publish_file
from megatron.config.text import format_compact, format_exponent, format_plain, printable
from megatron.training.loggers.base import BY_LAYER, metrics_under
from megatron.training.loggers.feature_metrics import FURTHER_LOSSES, layer_names
from megatron.training.loggers.run_folder import EXPERTS_FILE, HEALTH_FILE, HistoryPoint, RunHistory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INK_COLOR, MUTED_COLOR, GRID_COLOR = "#1f2933", "#7b8794", "#e4e7eb"
RUN_COLORS = ("#2563eb", "#ea580c", "#15803d", "#be185d", "#7c3aed", "#a16207", "#0e7490", "#4b5563")
DASHES = ("-", "--", ":", "-.")  # the next one is used when the colours repeat
MARKERS = "osD^v"
RATE_COLOR, BATCH_COLOR, SKIPPED_COLOR = "#0d9488", "#7c3aed", "#dc2626"
FEW_POINTS = 30  # with fewer points, every point has a marker
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
        raise ValueError("drawing needs matplotlib: pip install 'megatron-pretrain[plots]'") from error
    with rc_context({**STYLE, "axes.grid": grid}):
        figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
        yield figure
        if out.is_dir():
            raise OSError(f"{out} cannot be written: it is a folder")
        if not out.suffix:
            raise ValueError(f"{out}: the file name needs an extension: .png, .pdf or .svg")
        _make_literal(figure)
        image = BytesIO()
        figure.savefig(image, format=out.suffix.removeprefix("."))
        try:
            publish_file(out, image.getvalue())
        except OSError as error:
            raise OSError(f"{out} cannot be written: {error.strerror}") from error


def _make_literal(figure: Figure) -> None:
    """Show names as they are: without formulas between dollar signs, and without control characters."""
    from matplotlib.text import Text

    axes = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)]
    ticks = {
        text
        for axis in axes
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for text in tick.findobj(Text)
    }
    for text in set(figure.findobj(Text)) - ticks:
        text.set_parse_math(False)
        text.set_text(printable(text.get_text()))


def draw_runs(runs: Mapping[str, RunHistory], out: Path) -> None:
    """Draw the loss of each run over tokens (raw faint, smoothed bold, evaluations as points) above its learning rate.

    The keys are the names of the runs. A single run also gets its batch size, and vertical lines for skipped updates,
    restarts, rewinds and errors. Raises as :func:`open_figure`.
    """
    single = len(runs) == 1
    with open_figure(out, 9, 5.4) as figure:
        loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3.3, 1))
        for number, (name, run) in enumerate(runs.items()):
            color, dashes = RUN_COLORS[number % len(RUN_COLORS)], DASHES[number // len(RUN_COLORS) % len(DASHES)]
            width = 2.2 if single else max(4.0 - number, 1.2)  # equal runs stay visible behind each other
            _draw_training(loss, "training" if single else name, run.train, color, dashes, width)
            further = further_losses(run) if single else {}
            own = {label: RUN_COLORS[place % len(RUN_COLORS)] for place, label in enumerate(further, 2)}
            for label, points in further.items():
                _draw_training(loss, label, points, own[label], "-", 1.2)
            _draw_evaluations(loss, run, None if single else color, own)
            tokens = [point.tokens for point in run.train]
            rates = [point.learning_rate for point in run.train]
            rate.plot(tokens, rates, dashes, color=RATE_COLOR if single else color, linewidth=1.6)
        shown = [p.loss for run in runs.values() for p in (*run.train, *run.evaluations)]
        shown += [p.loss for run in runs.values() if single for points in further_losses(run).values() for p in points]
        _scale_loss_axis(loss, shown)
        loss.set_ylabel("loss per token (nats)")
        loss.set_title(next(iter(runs)) if single else f"{len(runs)} runs", loc="left", fontweight="bold")
        remark = "bold: training loss, smoothed; points: evaluations"
        rate.set_ylabel("learning rate")
        rate.set_ylim(bottom=0)
        rate.margins(y=0.15)
        rate.yaxis.set_major_formatter(lambda value, _: format_exponent(value))
        rate.set_xlabel("tokens")
        rate.xaxis.set_major_formatter(lambda value, _: format_compact(value, trim=True))
        if single:
            (run,) = runs.values()
            last = run.train[-1]
            remark = f"{last.iteration:,} steps, {format_compact(last.tokens)} tokens"
            _draw_batch_size(rate, run.train)
            for axes in (loss, rate):
                _draw_incidents(axes, run)
            _draw_phases(loss, rate, run)
        loss.set_title(remark, loc="right", color=MUTED_COLOR, fontsize=10)
        _add_legend(figure, loss)


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Add a legend below the axes, in the most columns that fit, and room for it."""
    handles = axes.get_legend_handles_labels()[0]
    for columns in (3, 2, 1) if handles else ():
        legend = figure.legend(handles=handles, loc="outside lower left", ncols=columns, fontsize=9)
        if legend.get_window_extent().width <= figure.bbox.width or columns == 1:
            figure.set_size_inches(9, 5.4 + 0.22 * (math.ceil(len(handles) / columns) - 1))
            return
        legend.remove()


def further_losses(run: RunHistory) -> dict[str, list[HistoryPoint]]:
    """Return by name each further loss of a run, as log lines that have it in place of the loss."""
    found: dict[str, list[HistoryPoint]] = {}
    for point in run.train:
        for prefix, label in FURTHER_LOSSES.items():
            for name, value in metrics_under(prefix, point.line).items():
                found.setdefault(f"{label}{name}", []).append(point._replace(line={**point.line, "lm loss": value}))
    return found


def running_mean(values: np.ndarray) -> np.ndarray:
    """Return the running mean ``[n]`` of ``values`` ``[n]``. The window grows from 1 at the steep start to n/15."""
    n = len(values)
    index = np.arange(n)
    half = np.minimum(index // 4, max(n // FEW_POINTS, 1))
    low = index - half
    high = np.minimum(index + half, n - 1) + 1
    for _ in range(2):  # the second pass smooths the kinks of the first
        total = np.concatenate([[0.0], np.cumsum(values)])
        values = (total[high] - total[low]) / (high - low)
    return values


def _draw_training(
    axes: Axes, name: str, points: Sequence[HistoryPoint], color: str, dashes: str, width: float
) -> None:
    """Draw the training loss; a log line without a finite loss is a cross at the bottom."""
    finite = [(point.tokens, point.loss) for point in points if math.isfinite(point.loss)]
    if finite:
        tokens, losses = np.array(finite).T
        smoothed = running_mean(losses)
        dots = "o" * (len(finite) < FEW_POINTS)
        axes.plot(tokens, losses, color=color, alpha=0.3, linewidth=0.9, marker=dots, markersize=3)
        label = f"{name}, smoothed: {smoothed[-1]:.3f} (last raw value {losses[-1]:.3f})"
        axes.plot(tokens, smoothed, dashes, color=color, linewidth=width, label=label)
    lost = [point.tokens for point in points if not math.isfinite(point.loss)]
    if lost:
        height = axes.get_xaxis_transform()  # x in tokens, y from 0 to 1 over the panel
        label = f"{name}: {len(lost)} log line{'' if len(lost) == 1 else 's'} without a finite loss"
        axes.plot(lost, [0.02] * len(lost), "x", color=color, label=label, transform=height, clip_on=False)


def _draw_evaluations(axes: Axes, run: RunHistory, color: str | None, own: Mapping[str, str]) -> None:
    """Draw the evaluations; without a ``color``, each validation set is in the legend.

    A set then has the colour of the further loss of its name, which ``own`` holds, or one that no other curve has.
    """
    evaluated = [point for point in run.evaluations if math.isfinite(point.loss)]
    free = [each for each in RUN_COLORS[1:] if each not in own.values()] or [MUTED_COLOR]
    others = 0
    for number, name in enumerate(dict.fromkeys(point.name for point in evaluated)):
        tokens, losses = np.array([(point.tokens, point.loss) for point in evaluated if point.name == name]).T
        of_name, mark = own.get(name.removeprefix("validation ")), MARKERS[number % len(MARKERS)]
        mine, dashes = color or of_name or free[others % len(free)], "--" if of_name and not color else "-"
        others += of_name is None
        label = None if color else f"{name}: {losses[-1]:.3f}"
        style: Any = {"linewidth": 1.0 if dashes == "--" else 0.6, "markersize": 6, "fillstyle": "none"}
        axes.plot(tokens, losses, f"{dashes}{mark}", color=mine, label=label, **style)


def _scale_loss_axis(axes: Axes, losses: Sequence[float]) -> None:
    """Make the loss axis logarithmic if high first losses would compress the rest of a linear axis."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite or not max(finite) > 3 * min(finite) > 0:
        return
    axes.set_yscale("log")
    axes.set_ylim(min(finite) / 1.05, max(finite) * 1.05)
    ticks = [float(f"{tick:.2g}") for tick in np.geomspace(min(finite), max(finite), 6)]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _draw_batch_size(rate: Axes, points: Sequence[HistoryPoint]) -> None:
    axes = rate.twinx()
    sizes = [int(point.line["batch-size"]) for point in points]
    starts = [*(point.tokens - point.tokens_per_step for point in points), points[-1].tokens]
    axes.step(starts, [*sizes, sizes[-1]], where="post", color=BATCH_COLOR, linewidth=1.2, linestyle="--")
    axes.set_ylim(0, 1.3 * max(sizes))
    axes.set_ylabel("batch size", color=BATCH_COLOR)
    axes.grid(visible=False)


def _draw_incidents(axes: Axes, run: RunHistory) -> None:
    """Draw a vertical line at each skipped update, restart, rewind and error."""
    skipped = [
        point.tokens - (point.iteration - step) * point.tokens_per_step
        for point in run.train
        for step in point.line.get("skipped-iterations", ())
    ]
    for noun, positions, color, dashes in (
        ("skipped update", skipped, SKIPPED_COLOR, "solid"),
        ("restart", run.restarts, "#52606d", "dashed"),
        ("rewind", run.rewinds, "#7c3aed", "dashdot"),
        ("error", run.errors, "#111827", "dotted"),
    ):
        if positions:
            label = f"{len(positions)} {noun}{'' if len(positions) == 1 else 's'}"
            height = axes.get_xaxis_transform()  # x in tokens, y from 0 to 1 over the panel
            style: Any = {"linestyles": dashes, "linewidth": 0.9, "alpha": 0.7}
            axes.vlines(positions, 0, 1, color, label=label, transform=height, **style)


def _draw_phases(loss: Axes, rate: Axes, run: RunHistory) -> None:
    """Shade every second phase, and write its name above the loss."""
    for number, (name, first, last) in enumerate(run.phases):
        for axes in (loss, rate):
            axes.axvspan(first, last, color=INK_COLOR, alpha=0.06 * (number % 2), linewidth=0, zorder=0)
            if number:
                axes.axvline(first, color=MUTED_COLOR, linewidth=0.8, zorder=0)
        height = loss.get_xaxis_transform()  # x in tokens, y from 0 to 1 over the panel
        style: Any = {"ha": "center", "va": "top", "fontsize": 9, "color": MUTED_COLOR}
        loss.text((first + last) / 2, 0.985, name, transform=height, **style)


HEALTH_PANELS = {
    "grad-norm": "gradient norm, before clipping",
    "update-ratio": "update / weight",
    "activation-rms": "activations, root mean square",
    "attention-logit": "largest attention logit",
    "params-norm": "norm of the weights",
    "zeros-share": "share of zeros in the gradient",
    "expert-load": "tokens of the busiest expert / mean",
}
"""Title of each quantity's heat map."""


def draw_health(history: RunHistory, title: str, out: Path) -> bool:
    """Draw each health metric over layers and steps; return False if the run has none. Raises as `open_figure`."""
    reports = history.health
    layers = {
        kind: list(dict.fromkeys(n for p in reports for n in metrics_under(f"health/{kind}/", p.line) if n != "total"))
        for kind in HEALTH_PANELS
    }
    panels = {kind: label for kind, label in HEALTH_PANELS.items() if layers[kind]}
    if not panels:
        return False
    rows = math.ceil(len(panels) / 2)
    with open_figure(out, 11, 2.8 * rows, grid=False) as figure:
        figure.suptitle(f"{title}: health of every layer", x=0.01, ha="left", fontweight="bold")
        grid = list(figure.subplots(rows, 2, squeeze=False).flat)
        for axes, (kind, label) in zip(grid, panels.items()):
            axes.set_title(label, loc="left", fontsize=10)
            found = [[p.line.get(f"health/{kind}/{layer}") for p in reports] for layer in layers[kind]]
            _draw_heat_map(figure, axes, np.array(found, dtype=float), layers[kind], [p.iteration for p in reports])
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
    return True


EXPERT_PANELS = {"expert-load-max": "busiest expert of every layer", "expert-load-min": "idlest expert of every layer"}
"""Metric and title of each heat map over steps."""

MAX_COLUMNS = 400  # of a heat map; more log lines are drawn as the extremes of several
SNAPSHOTS = 4  # heat maps of all experts, the first and the last record among them
DEAD_COLOR = "#000000"  # darker than all loads, also in greyscale


def draw_experts(history: RunHistory, title: str, out: Path) -> bool:
    """Draw the load of experts over layers and steps, dropped choices, and the load of all experts at some steps.

    Returns:
        False if the run has no experts, or no step whose loads were counted.

    Raises:
        ValueError: as :func:`open_figure`.
        OSError: likewise.
    """
    lines = [p for p in history.train if f"expert-load-max{BY_LAYER}" in p.line]
    if not lines:
        return False

    def by_layer(kind: str) -> np.ndarray:
        """Return a metric ``[layers, steps]``, NaN for layers without experts."""
        empty = [None] * len(names)
        return np.array([p.line.get(f"{kind}{BY_LAYER}", empty) for p in lines], dtype=float).T

    names = layer_names(lines[-1].line)
    extremes = {kind: by_layer(kind) for kind in EXPERT_PANELS}
    layers = [n for n, values in enumerate(extremes["expert-load-max"]) if not np.isnan(values).all()]
    if not layers:  # every step was skipped
        return False
    shown_names = [names[n] for n in layers]
    dropped = np.nan_to_num(by_layer("dropped-choices")[layers])
    records = [(p.iteration, np.array(rows)) for p in history.train if len(rows := p.loads_of_experts) == len(layers)]
    shown = sorted({round(at) for at in np.linspace(0, len(records) - 1, SNAPSHOTS)}) if records else []
    limit = max(2.0, np.nanmax(extremes["expert-load-max"]), *(records[n][1].max() / 100 for n in shown))
    height = max(2.0, 1.2 + 0.09 * len(layers))
    with open_figure(out, 11, height * (1 + bool(shown)) + 0.6, grid=False) as figure:
        figure.suptitle(f"{title}: load of the experts", x=0.01, ha="left", fontweight="bold")
        grid, panels = figure.add_gridspec(1 + bool(shown), 12), [*EXPERT_PANELS.items()]
        width = 12 // (len(panels) + bool(dropped.any()))
        for place, (kind, label) in enumerate(panels):
            axes = figure.add_subplot(grid[0, width * place : width * (place + 1)])
            steps, values = _columns(extremes[kind][layers], [p.iteration for p in lines], kind.endswith("max"))
            mesh = _draw_loads(axes, values, shown_names, [f"{step:,}" for step in steps], limit)
            axes.set_title(label, loc="left", fontsize=10)
            axes.set_xlabel("step", fontsize=9)
        if dropped.any():
            axes = figure.add_subplot(grid[0, 12 - width :])
            steps, values = _columns(dropped, [p.iteration for p in lines], True)
            _draw_dropped(axes, values, shown_names, [f"{step:,}" for step in steps])
        width = 12 // max(1, len(shown))
        for place, (step, percent) in enumerate(records[n] for n in shown):
            axes = figure.add_subplot(grid[1, width * place : width * (place + 1)])
            _draw_loads(axes, percent / 100, shown_names, [*map(str, range(percent.shape[1]))], limit)
            dead = f": {(percent == 0).sum():,} dead" if (percent == 0).any() else ""
            axes.set_title(f"until step {step:,}{dead}", loc="left", fontsize=10)
            axes.set_xlabel("expert", fontsize=9)
        bar = figure.colorbar(mesh, ax=figure.axes, location="right", shrink=0.8, pad=0.01)
        ticks = [2.0**n for n in range(-math.floor(math.log2(limit)), math.floor(math.log2(limit)) + 1)]
        bar.set_ticks(ticks, labels=[f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}" for tick in ticks])
        bar.ax.minorticks_off()
        bar.set_label("tokens / mean of the layer; black: none", fontsize=9)
    return True


def _columns(values: np.ndarray, steps: list[int], largest: bool) -> tuple[list[int], np.ndarray]:
    """Return at most ``MAX_COLUMNS`` columns of ``[layers, steps]``, each the extreme of several, and their steps."""
    parts = np.array_split(np.arange(len(steps)), min(len(steps), MAX_COLUMNS))
    extreme = np.max if largest else np.min
    return [steps[part[-1]] for part in parts], np.stack([extreme(values[:, part], axis=1) for part in parts], axis=1)


def _draw_loads(axes: Axes, loads: np.ndarray, layers: list[str], columns: list[str], limit: float) -> Any:
    """Draw loads ``[layers, columns]``, darker the larger, with the first layer at the bottom; return the mesh."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, LogNorm

    axes.set_facecolor(DEAD_COLOR)
    colors = ListedColormap(colormaps["YlOrRd"](np.linspace(0, 0.8, 256)))  # without the darkest ones
    return _draw_cells(axes, np.ma.masked_less_equal(loads, 0), layers, columns, LogNorm(1 / limit, limit), colors)


def _draw_dropped(axes: Axes, shares: np.ndarray, layers: list[str], columns: list[str]) -> None:
    """Draw the shares of dropped choices ``[layers, columns]``, from white for none to blue for the most."""
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    colors = LinearSegmentedColormap.from_list("dropped", ["#ffffff", RUN_COLORS[0]])
    _draw_cells(axes, shares, layers, columns, Normalize(0, shares.max()), colors)
    axes.set_title(f"dropped choices, up to {shares.max():.2%}", loc="left", fontsize=10)
    axes.set_xlabel("step", fontsize=9)


def _draw_cells(axes: Axes, values: np.ndarray, layers: list[str], columns: list[str], norm: Any, colors: Any) -> Any:
    """Draw ``values`` ``[layers, columns]`` as coloured cells with their names; return the mesh."""
    edges = np.arange(values.shape[1] + 1), np.arange(len(layers) + 1)
    mesh = axes.pcolormesh(*edges, values, norm=norm, cmap=colors)
    axes.set_ylabel("layer", fontsize=9)
    for axis, names, most in ((axes.yaxis, layers, 12), (axes.xaxis, columns, 6)):
        ticks = range(0, len(names), math.ceil(len(names) / most))
        axis.set_ticks([i + 0.5 for i in ticks], [names[i] for i in ticks], fontsize=8)
    return mesh


def _draw_heat_map(figure: Figure, axes: Axes, values: np.ndarray, layers: list[str], steps: list[int]) -> None:
    """Draw ``values`` ``[layers, steps]``, NaN if missing, with the first layer at the bottom."""
    from matplotlib.colors import LogNorm, Normalize

    masked = np.ma.masked_invalid(values)
    known = masked.compressed() if masked.count() else np.zeros(1)
    wide = known.min() > 0 and known.max() > 3 * known.min()  # then colours are logarithmic
    norm = (LogNorm if wide else Normalize)(known.min(), known.max())
    axes.set_facecolor(SKIPPED_COLOR)  # visible where a value is missing or not finite
    mesh = axes.pcolormesh(np.arange(len(steps) + 1), np.arange(len(layers) + 1), masked, norm=norm, cmap="viridis")
    bar = figure.colorbar(mesh, ax=axes, pad=0.02)
    ticks = [float(tick) for tick in norm.inverse(np.linspace(0, 1, 4))]
    bar.set_ticks(ticks, labels=[format_plain(tick) for tick in ticks])
    bar.ax.minorticks_off()
    for axis, names, most in ((axes.yaxis, layers, 12), (axes.xaxis, [f"{step:,}" for step in steps], 6)):
        shown = range(0, len(names), math.ceil(len(names) / most))
        axis.set_ticks([i + 0.5 for i in shown], [names[i] for i in shown], fontsize=8)
    axes.set_xlabel("step", fontsize=9)


LAYER_PLOTS: Mapping[str, tuple[str, Callable[[RunHistory, str, Path], bool]]] = {
    HEALTH_FILE: ("health of every layer", draw_health),
    EXPERTS_FILE: ("load of the experts", draw_experts),
}
"""Plots of the layers of a run, by their files in its folder: what each shows, and its function."""
