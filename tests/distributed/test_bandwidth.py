"""The benchmark of bandwidth in miniature: its numbers, and wrong results that it must report."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks import bandwidth
from benchmarks.bandwidth import EVERYWHERE, OPERATIONS, Figure
from megatron.distributed import comm
from megatron.distributed.launch import world_group
from tests.kit.pool import Pool, RankError


def by_hand(operation: str, buffers: list[Tensor], rank: int) -> Tensor:
    """Compute a rank's result of an operation from all ranks' buffers, without communication."""
    ranks = len(buffers)
    parts = [x.chunk(ranks) for x in buffers]
    total = torch.stack(buffers).sum(0)
    return {
        "all-reduce": total,
        "reduce-scatter": total.chunk(ranks)[rank],
        "all-gather": torch.cat([parts[other][other] for other in range(ranks)]),
        "all-to-all": torch.cat([parts[other][rank] for other in range(ranks)]),
        "send/receive": buffers[rank - 1],
    }[operation]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_expected_results_equal_the_definition_of_the_operation(operation: str, ranks: int) -> None:
    x = torch.empty(4 * ranks, dtype=torch.float64)
    buffers = [bandwidth.filled(x, ranks, rank) for rank in range(ranks)]
    for rank in range(ranks):
        assert torch.allclose(bandwidth.expected(operation, x, ranks, rank), by_hand(operation, buffers, rank))


def test_shares_of_the_bus_match_nccl_tests() -> None:
    shares = {
        "all-reduce": 1.75,
        "reduce-scatter": 0.875,
        "all-gather": 0.875,
        "all-to-all": 0.875,
        "send/receive": 1.0,
    }
    assert {operation: bandwidth.share_of_bus(operation, 8) for operation in OPERATIONS} == shares


def measured(rank: int, ranks: int, sizes: tuple[int, ...], wrong: bool) -> list[Figure]:
    """Return the benchmark's results of three ranks; ``wrong`` when nothing is sent in an all-to-all."""
    fault = patch.object(comm, "start_all_to_all", lambda x, group: comm.Pending(x)) if wrong else nullcontext()
    world = world_group(rank, ranks)
    with fault, patch.object(bandwidth, "SECONDS", 0.0):
        printed = bandwidth.figures_of({EVERYWHERE: world}, world, sizes, torch.device("cpu"))
    return [Figure(**figure) for figure in printed["figures"]]


def test_ranks_are_measured(pool: Pool) -> None:
    ranks = pool.run(3, measured, (1,), False)
    assert ranks[0] == ranks[1] == ranks[2]  # the slowest rank's time, on all
    assert [figure.operation for figure in ranks[0]] == [*OPERATIONS]
    for figure in ranks[0]:
        share = bandwidth.share_of_bus(figure.operation, 3)
        assert figure.bus == pytest.approx(share * (2**20 // 12 * 12) / figure.seconds / 1e9, rel=1e-3)
    page = bandwidth.page(ranks[0]).splitlines()
    assert page[1] == "bus bandwidth, GB/s: all ranks, groups of 3"
    assert page[2].split() == ["1", "MB"]
    assert [line.split()[0] for line in page[3:]] == [*OPERATIONS]


def test_a_wrong_result_is_reported(pool: Pool) -> None:
    with pytest.raises(RankError, match="all-to-all of 1 MB over all ranks gives a wrong result on rank"):
        pool.run(2, measured, (1,), True)


def test_buffers_differ_in_every_part_of_every_rank() -> None:
    x = torch.empty(40)
    assert len({value for rank in range(4) for value in bandwidth.filled(x, 4, rank).tolist()}) == 16


def test_one_rank_alone_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert bandwidth.main([]) == 2
    assert "E202 bandwidth needs at least two ranks\n  fix: torchrun" in capsys.readouterr().err
