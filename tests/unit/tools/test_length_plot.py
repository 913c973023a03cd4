"""The picture of documents' lengths."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.inspect import DatasetSummary, summarize
from tests.unit.data.pairs import write
from tools.lib.plots import bin_edges, draw_lengths


def summary_of(folder: Path, lengths: list[int]) -> DatasetSummary:
    return summarize(IndexedDataset(write(folder / "x", [[1] * n for n in lengths])))


@pytest.mark.parametrize(("shortest", "longest"), [(0, 0), (1, 1), (5, 5), (1, 2), (1, 100), (37, 123456), (1, 2**31)])
def test_every_length_lies_in_a_bin(shortest: int, longest: int) -> None:
    edges = bin_edges(shortest, longest)
    assert (np.diff(edges) > 0).all()
    assert (edges == edges.round()).all()
    assert edges[0] <= max(shortest, 1) <= max(longest, 1) < edges[-1]


def test_shares_of_all_bins_are_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **options: (drawn.append(figure), save(figure, *args, **options))
    )
    lengths = [3, 0, 17, 17, 400, 1]
    draw_lengths([("name", summary_of(tmp_path, lengths))], tmp_path / "out.png")
    (axes,) = drawn[0].axes
    assert axes.get_title("left") == "name"
    assert axes.get_title("right") == "6 documents, 438 tokens"
    assert axes.get_xscale() == "log"
    documents, tokens = (patch.get_data() for patch in axes.patches)
    for data, weight in ((documents, lambda n: 1 / 5), (tokens, lambda n: n / 438)):
        assert data.values.sum() == pytest.approx(100)
        for n in (1, 3, 17, 400):
            inside = np.searchsorted(data.edges, n, side="right") - 1
            assert data.values[inside] == pytest.approx(100 * weight(n) * lengths.count(n))
    assert [text.get_text() for text in axes.texts] == [" median 17 ", " 99th percentile 400 "]
    assert [text.get_horizontalalignment() for text in axes.texts] == ["left", "right"]


def test_one_panel_for_each_pair_also_without_tokens(tmp_path: Path) -> None:
    pairs = [(str(n), summary_of(tmp_path, lengths)) for n, lengths in enumerate([[], [0, 0], [5, 5], [1]])]
    draw_lengths(pairs, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".partial*"))


def test_equal_lengths_are_marked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **options: (drawn.append(figure), save(figure, *args, **options))
    )
    draw_lengths([("name", summary_of(tmp_path, [372_116]))], tmp_path / "out.png")
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["372,116"]
    assert not axes.get_xticks(minor=True).size
    assert max(axes.get_yticks()) == 100 < axes.get_ylim()[1]
    assert axes.get_title("right") == "1 document, 372K tokens"


def test_an_unknown_image_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="xyz"):
        draw_lengths([("x", summary_of(tmp_path, [1]))], tmp_path / "out.xyz")
    assert not list(tmp_path.glob("*out*"))


def test_without_matplotlib_it_names_the_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **keywords: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **keywords)

    summary = summary_of(tmp_path, [1])
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"pip install 'megatron-pretrain\[plots\]'"):
        draw_lengths([("x", summary)], tmp_path / "out.png")
