"""The benchmark of kernels, in small."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks.kernels import PLAIN, losses, peak, ratios, table

SMALL = argparse.Namespace(tokens=64, vocabulary=1000, hidden=8, chunk=16)


def test_the_contestants_compute_the_same_and_ours_without_full_logits() -> None:
    runs = losses(SMALL, torch.float32)
    plain, ours = runs[PLAIN], runs["in chunks, eager"]
    assert ours().item() == pytest.approx(plain().item(), rel=1e-5)
    logits = 64 * 1000 * 4
    assert peak(plain) >= 2 * logits
    assert peak(ours) < logits


def test_ratios_are_of_neighbours() -> None:
    assert ratios({"a": [2.0, 4.0, 9.0], "b": [1.0, 1.0, 3.0]}) == {"b": [3.0, 2.0, 4.0]}


def test_the_table_leaves_open_what_was_not_measured() -> None:
    rows = table({"loss": {"plain": {"megabytes": 2.5}, "ours": {"speed": [1.25, 1.0, 1.5]}}}, {"rounds": 3})
    assert "| plain |  |  |  | 2.5 |" in rows
    assert "| ours | 1.25 | 1.00 | 1.50 |  |" in rows
    assert rows.endswith("rounds 3.\n")
