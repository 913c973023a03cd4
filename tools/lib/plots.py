"""Plot of the document lengths of token files, for tools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron.config.text import counted, format_compact
from megatron.data.inspect import DatasetSummary
from megatron.training.loggers.plots import MUTED_COLOR, open_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    right = f"{counted(summary.documents, 'document')}, {format_compact(summary.tokens)} tokens"
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
