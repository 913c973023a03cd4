"""Data and checkpoints, against megatron-core itself: the same samples, and runs that move here and back."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.data import build
from tests.megatron_core.beside import missing
from tests.megatron_core.moves import MOVES, move
from tests.megatron_core.sample_orders import compare, random_setting

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]


def test_samples_are_equal(tmp_path: Path) -> None:
    found = compare([random_setting(seed) for seed in range(100)], tmp_path)
    assert found.counts["equal"] > 60
    assert (found.counts["different"], found.counts["refused here alone"]) == (0, 0), found.findings


def test_other_samples_are_seen(tmp_path: Path) -> None:
    """Each source of a blend is built for 50 % more samples, which are in another order."""
    with patch.object(build, "OVERSAMPLING", 0.5):
        assert compare([random_setting(seed) for seed in range(12)], tmp_path).counts["different"] > 0


@pytest.mark.parametrize("case", ["gpt", "llama, TP 2 to PP 2", "experts"])
def test_a_run_moves_here_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.chdir(tmp_path)
    for found in move(tmp_path, MOVES[case]):
        assert found.steps == 50
        assert found.loss <= 1e-6
        assert found.grad_norm <= 1e-5
