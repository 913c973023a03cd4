"""Tokens of context-parallel ranks, and the work of each."""

from __future__ import annotations

from itertools import product

import pytest
import torch.distributed as dist

from megatron.config.parallel import ParallelConfig
from megatron.distributed import comm
from megatron.distributed.context_parallel import ContextParallel, chunks_of, chunks_of_all, rows_between
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh

SIZES = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 2), (2, 4)]
"""Ranks of a ring, and ranks that exchange heads."""


@pytest.fixture(autouse=True)
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of one process that stands for all ranks."""
    monkeypatch.setattr(comm, "new_group", lambda ranks, *_: tuple(ranks))
    monkeypatch.setattr(comm, "open_communicator", lambda ranks: None)
    monkeypatch.setattr(dist, "get_backend", lambda *_: "fake")


def ranks_of(ring: int, heads: int, tp: int = 2) -> list[ContextParallel]:
    config = ParallelConfig(tensor_model_parallel_size=tp, context_parallel_size=ring * heads)
    layout = Layout.from_config(config, 2 * tp * ring * heads)
    meshes = [Mesh(layout, rank, cp_head_ranks=heads) for rank in range(layout.world_size)]
    return [ContextParallel(mesh.cp_ring, mesh.cp_heads) for mesh in meshes]


@pytest.mark.parametrize(("ring", "heads"), SIZES)
def test_ranks_hold_every_token_once(ring: int, heads: int) -> None:
    """Tensor-parallel peers hold the same ones, and so do replicas."""
    length = 8 * ring * heads
    held = [[i for part in cp.rows(length) for i in part] for cp in ranks_of(ring, heads)]
    mine = [held[rank] for rank in range(0, len(held) // 2, 2)]
    assert sorted(i for rows in mine for i in rows) == [*range(length)]
    assert {len(rows) for rows in mine} == {8}
    assert held == 2 * [rows for rows in mine for _ in range(2)]


@pytest.mark.parametrize(("ring", "heads"), SIZES)
def test_ranks_that_exchange_heads_are_neighbours(ring: int, heads: int) -> None:
    """On a node if possible, with one rank of tensor parallelism each."""
    for rank, cp in enumerate(ranks_of(ring, heads)):
        assert cp.heads.ranks[cp.heads.rank] == cp.ring.ranks[cp.ring.rank] == rank
        assert [*cp.heads.ranks] == [*range(cp.heads.ranks[0], cp.heads.ranks[0] + 2 * heads, 2)]
        assert [*cp.ring.ranks] == [*range(cp.ring.ranks[0], cp.ring.ranks[0] + 2 * heads * ring, 2 * heads)]


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_all_ranks_of_a_ring_see_equally_many_keys(ring: int) -> None:
    length = 16 * ring
    seen = [sum(i + 1 for chunk in chunks_of(length, ring, rank) for i in chunk) for rank in range(ring)]
    assert len(set(seen)) == 1
    assert sorted(i for chunk in chunks_of_all(length, ring) for i in chunk) == [*range(length)]


def test_rows_between_match_the_concatenated_ranges() -> None:
    ranges = (range(3, 7), range(20, 22), range(9, 10))
    every = [i for part in ranges for i in part]
    for start, stop in product(range(len(every) + 1), repeat=2):
        found = rows_between(ranges, start, stop)
        assert [i for part in found for i in part] == every[start:stop]
        assert all(len(part) for part in found)
