"""Plots for tools: the loss curves of several runs, and document lengths of token files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron.data.errors import pluralize
from megatron.data.inspect import DatasetSummary
from megatron.training.loggers.console import format_compact
from megatron.training.loggers.plots import (
    FEW_POINTS,
    MUTED_COLOR,
    label_tokens,
    open_figure,
    running_mean,
    scale_loss_axis,
    scale_rate_axis,
)
from megatron.training.loggers.run_folder import RunHistory

if TYPE_CHECKING:
    from matplotlib.axes import Axes


RUN_COLORS = ("#2563eb", "#ea580c", "#15803d", "#be185d", "#7c3aed", "#a16207", "#0e7490", "#4b5563")
DASHES = ("-", "--", ":", "-.")
"""Line styles; the next one is used when the colours repeat."""
RUN_MARKERS = "sD^v"
RUN_MARKER_SIZES = (11.0, 9.0, 7.0, 5.0)
"""Marker sizes of validation points: hollow and decreasing, so that equal points of several runs stay visible."""
RUN_LINE_WIDTHS = (4.0, 2.2, 1.6, 1.1)
"""Line widths, decreasing for the same reason."""


class RunStyle(NamedTuple):
    """Style of one run."""

    color: str
    dashes: str
    mark: str
    size: float
    width: float


def draw_runs(runs: Mapping[str, RunHistory], out: Path) -> None:
    """Draw the loss of each run over tokens (raw faint, smoothed bold, validation as points) above its learning rate.

    The keys are the names of the runs; the legend adds the last smoothed loss. Raises as :func:`open_figure`.
    """
    columns = 1 if max(map(len, runs)) > 40 else 2
    with open_figure(out, 9, 5.2 + 0.22 * (len(runs) / columns)) as figure:  # the legend is below the axes
        loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3.6, 1))
        for (name, history), look in zip(runs.items(), run_styles()):
            _draw_loss(loss, name, history, look)
            tokens = [point.tokens for point in history.train]
            rates = [point.learning_rate for point in history.train]
            rate.plot(tokens, rates, color=look.color, linestyle=look.dashes, linewidth=look.width)
        losses = [p.loss for history in runs.values() for p in history.train if np.isfinite(p.loss)]
        scale_loss_axis(loss, losses + [value for history in runs.values() for _, value in _validation(history)])
        marks = "; hollow marks: validation" if any(map(_validation, runs.values())) else ""
        loss.set_title(f"{len(runs)} runs", loc="left", fontweight="bold")
        loss.set_title(f"bold: training loss, smoothed{marks}", loc="right", color=MUTED_COLOR, fontsize=10)
        loss.set_ylabel("loss per token (nats)")
        rate.set_ylabel("learning rate")
        scale_rate_axis(rate)
        label_tokens(rate)
        figure.legend(
            handles=loss.get_legend_handles_labels()[0],
            loc="outside lower left",
            ncols=columns,
            fontsize=9,
            title="training loss at the end, smoothed",
            title_fontsize=9,
            alignment="left",
        )


def run_styles() -> Iterator[RunStyle]:
    """Yield one style per run; styles repeat after all colours and line styles are used."""
    lines = cycle([(color, dashes) for dashes in DASHES for color in RUN_COLORS])
    for (color, dashes), (mark, size, width) in zip(lines, cycle(zip(RUN_MARKERS, RUN_MARKER_SIZES, RUN_LINE_WIDTHS))):
        yield RunStyle(color, dashes, mark, size, width)


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest path suffixes that distinguish the folders. Raise ValueError if a folder is given twice."""
    paths = [folder.resolve() for folder in folders]
    if duplicates := [str(folder) for folder, path in zip(folders, paths) if paths.count(path) > 1]:
        raise ValueError(f"{duplicates[0]} is given twice: give each run once")
    names = []
    for path in paths:
        length = 1
        while sum(other.parts[-length:] == path.parts[-length:] for other in paths) > 1:
            length += 1
        names.append(str(Path(*path.parts[-length:])))
    return names


def _draw_loss(axes: Axes, name: str, history: RunHistory, look: RunStyle) -> None:
    points = [(p.tokens, p.loss) for p in history.train if np.isfinite(p.loss)]
    color, dashes, mark, size, width = look
    if not points:
        axes.plot([], [], color=color, linestyle=dashes, label=f"{name}: no finite loss")
        return
    tokens, losses = np.array(points).T
    smoothed, dots = running_mean(losses, least=1), "o" * (len(points) < FEW_POINTS)
    axes.plot(tokens, losses, color=color, alpha=0.25, linewidth=0.8, marker=dots, markersize=3)
    axes.plot(tokens, smoothed, color=color, linestyle=dashes, linewidth=width, label=f"{name}: {smoothed[-1]:.3f}")
    if evaluated := _validation(history):
        axes.plot(*np.array(evaluated).T, mark, color=color, markersize=size, fillstyle="none", markeredgewidth=1.5)


def _validation(history: RunHistory) -> list[tuple[int, float]]:
    """Return tokens and losses of a run's only validation set; runs with several sets have no points."""
    return [(p.tokens, p.loss) for p in history.evaluations if np.isfinite(p.loss) and p.name == "validation"]


DOCUMENTS_COLOR, TOKENS_COLOR, QUANTILE_COLOR = "#2563eb", "#ea580c", "#52606d"
BINS = 60
NEARLY_EQUAL_RATIO = 1.2  # below this ratio of longest to shortest, only the two lengths are labelled
QUANTILES = (("median", 0.5, "--", 0.98), ("99th percentile", 0.99, ":", 0.9))
"""Label, quantile of the documents, line style, height of the label."""


def draw_lengths(summaries: Sequence[tuple[str, DatasetSummary]], out: Path) -> None:
    """Draw one panel for each ``(title, summary)``. Raises as :func:`open_figure`."""
    with open_figure(out, 9, 1.4 + 2.6 * len(summaries)) as figure:
        panels = figure.subplots(len(summaries), 1, sharex=True, squeeze=False)[:, 0]
        shortest = min((summary.lengths.quantile(0) for _, summary in summaries if summary.lengths.total), default=1)
        longest = max((summary.lengths.quantile(1) for _, summary in summaries), default=1)
        for axes, (title, summary) in zip(panels, summaries):
            _draw_panel(axes, summary, math.sqrt(shortest * longest))
            axes.set_title(title, loc="left", fontweight="bold")
        _mark_lengths(panels[-1], shortest, max(shortest, longest))
        panels[-1].set_xlabel("tokens of a document")
        handles = panels[0].get_legend_handles_labels()[0]
        figure.legend(handles=handles, loc="outside lower left", ncols=4, fontsize=9)


def _draw_panel(axes: Axes, summary: DatasetSummary, middle: float) -> None:
    """Draw the shares of documents and of tokens by document length, without empty documents.

    ``middle`` is the centre of the length axis.
    """
    lengths = summary.lengths
    edges = bin_edges(lengths.quantile(0), lengths.quantile(1))
    documents, _ = np.histogram(lengths.values, edges, weights=lengths.counts)
    tokens, _ = np.histogram(lengths.values, edges, weights=lengths.counts * lengths.values)
    share = 100 * documents / max(lengths.total, 1)
    axes.stairs(share, edges, fill=True, color=DOCUMENTS_COLOR, alpha=0.75, label="documents")
    axes.stairs(100 * tokens / max(summary.tokens, 1), edges, color=TOKENS_COLOR, linewidth=1.8, label="tokens")
    if lengths.total:
        _mark_quantiles(axes, summary, middle)
    axes.margins(y=0.25)
    axes.set_ylim(bottom=0)
    axes.set_yticks([tick for tick in axes.get_yticks() if tick <= 100])  # the space above 100% is for labels
    axes.set_xscale("log")
    axes.set_ylabel("share of all (%)")
    right = f"{pluralize(summary.documents, 'documents')}, {format_compact(summary.tokens)} tokens"
    axes.set_title(right, loc="right", color=MUTED_COLOR, fontsize=10)


def _mark_lengths(axes: Axes, shortest: int, longest: int) -> None:
    """Label the length axis: powers of ten, more ticks on a narrow range, both ends if lengths are nearly equal."""
    if longest < NEARLY_EQUAL_RATIO * shortest:
        axes.set_xlim(max(shortest - 1, 0.5), longest + 2)
        axes.set_xticks(sorted({shortest, longest}), labels=[f"{length:,}" for length in sorted({shortest, longest})])
        axes.set_xticks([], minor=True)
        return
    narrow = longest < 20 * shortest
    axes.xaxis.set_major_formatter(lambda value, _: format_compact(value, trim=True))
    axes.xaxis.set_minor_formatter(lambda value, _: format_compact(value, trim=True) if narrow else "")


def _mark_quantiles(axes: Axes, summary: DatasetSummary, middle: float) -> None:
    height = axes.get_xaxis_transform()  # x in tokens, y from 0 to 1 over the panel
    for name, quantile, style, y in QUANTILES:
        length = summary.lengths.quantile(quantile)
        side = "right" if length > middle else "left"  # towards the middle
        axes.axvline(length, color=QUANTILE_COLOR, linewidth=1.2, linestyle=style)
        axes.text(length, y, f" {name} {length:,} ", transform=height, ha=side, va="top", fontsize=9)


def bin_edges(shortest: int, longest: int) -> np.ndarray:
    """Return integer bin edges ``[n + 1]`` in about equal ratios, from ``shortest`` to above ``longest`` (tokens)."""
    return np.unique(np.geomspace(max(shortest, 1), longest + 1, BINS + 1).round()) if longest else np.array([1.0, 2.0])
