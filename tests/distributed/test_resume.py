"""Runs that go on: on any other layout, after signals, failures and changes of mind, on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.config.run import CheckpointConfig
from tests.distributed.grid import FACTORS
from tests.distributed.pool import Pool
from tests.distributed.resume import (
    BEFORE,
    Pair,
    config_of,
    gathered,
    load_and_go_on,
    random_pair,
    ranks_of,
    save_and_go_on,
)
from tests.runs import checkpoint

PAIRS = [random_pair(seed) for seed in range(9)] + [random_pair(seed, on_four=True) for seed in (0, 9)]


def check_pair(pool: Pool, folder: Path, pair: Pair) -> None:
    saving, loading = CheckpointConfig(save=str(folder)), CheckpointConfig(load=str(folder))
    whole = pool.run(ranks_of(pair.before), save_and_go_on, config_of(pair.before, saving), check_collectives=False)
    other = pool.run(ranks_of(pair.after), load_and_go_on, config_of(pair.after, loading), check_collectives=False)
    saved, loaded = gathered(whole), gathered(other)
    stored, _ = checkpoint(folder / f"iter_{BEFORE:07d}")
    assert stored.keys() == saved.weights.keys() | saved.grads.keys()
    for name, tensor in stored.items():
        for trace in (saved, loaded):
            assert torch.equal((trace.weights | trace.grads)[name], tensor), name
    assert (saved.drifted, loaded.drifted) == ([], [])
    for leg in other:
        assert leg.losses == pytest.approx(whole[0].losses, rel=1e-10)
        assert leg.digest == whole[0].digest


def test_the_layouts_are_of_all_kinds() -> None:
    for side in ("before", "after"):
        choices = [getattr(pair, side) for pair in PAIRS]
        assert {c["dp"] for c in choices} == {1, 2, 3}
        assert {c["tp"][0] for c in choices} == {"1", "2", "4"}
    assert any(int(pair.before["tp"][0]) > pair.before["kv_heads"] for pair in PAIRS)
    for switch in ("kv_heads", "untied", "vocab", "biases", "optimizer", "dropout"):
        assert {pair.before[switch] for pair in PAIRS} == set(FACTORS[switch]), switch


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_run_goes_on_on_any_other_layout(pool: Pool, tmp_path: Path, pair: Pair) -> None:
    check_pair(pool, tmp_path, pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [random_pair(seed, on_four=True) for seed in range(100, 300)], ids=str)
def test_a_run_goes_on_on_any_other_layout_long(pool: Pool, tmp_path: Path, pair: Pair) -> None:
    check_pair(pool, tmp_path, pair)
