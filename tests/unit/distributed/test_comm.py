"""What a process alone does, and waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.distributed import comm, mappings
from megatron.distributed.comm import Group, Pending
from megatron.distributed.grad_accumulator import WgradOperand
from tests.solo import one_rank_mesh

ALONE = Group()


class Work:
    """Fills the result only when it is waited for."""

    def __init__(self, result: torch.Tensor) -> None:
        self.result, self.waits = result, 0

    def wait(self) -> None:
        self.waits += 1
        self.result.fill_(7.0)


def test_pending_waits_once() -> None:
    result = torch.zeros(2)
    work: Any = Work(result)
    pending = Pending(result, work)
    assert pending.wait() is result
    assert pending.wait().tolist() == [7.0, 7.0]
    assert work.waits == 1


def test_pending_without_work_is_there() -> None:
    result = torch.ones(1)
    assert Pending(result).wait() is result


@pytest.mark.parametrize("operation", [comm.all_reduce, comm.all_gather, comm.reduce_scatter])
def test_raw_operations_alone_return_their_input(operation: Callable[..., torch.Tensor]) -> None:
    x = torch.randn(4, 2)
    assert operation(x, ALONE) is x


@pytest.mark.parametrize(
    "operation",
    [mappings.copy_to_region, mappings.reduce_from_region, mappings.gather_rows, mappings.reduce_scatter_rows],
)
def test_collectives_alone_return_their_input(operation: Callable[..., torch.Tensor]) -> None:
    x = torch.randn(4, 2, requires_grad=True)
    assert operation(x, ALONE) is x


@pytest.mark.parametrize("on_gpu", [True, False])
def test_sums_take_the_place_of_a_ranks_rows_on_gpus_alone(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    outs = []
    monkeypatch.setattr(comm, "_reduce_scatter", lambda out, x, **rest: outs.append(out))
    monkeypatch.setattr(torch.Tensor, "is_cuda", on_gpu)
    x = torch.zeros(6, 2)
    comm.start_reduce_scatter(x, Group((0, 1, 2), 1), x[2:4])
    comm.start_reduce_scatter(x, Group((0, 1, 2), 1))
    assert [out.shape for out in outs] == [(2, 2), (2, 2)]
    assert [out.data_ptr() == x[2:4].data_ptr() for out in outs] == [on_gpu, False]


def test_rows_alone_are_whole() -> None:
    x = torch.randn(4, 2)
    assert WgradOperand(x).wait() is x
    assert WgradOperand(x, ALONE).start().wait() is x


def test_mesh_alone_needs_no_torch_distributed() -> None:
    mesh = one_rank_mesh()
    assert not dist.is_initialized()
    assert all(g == Group((0,)) for g in (mesh.tp, mesh.dp_cp, mesh.world, mesh.tp_subgroup((0,))))
    assert comm.all_gather_objects("x", mesh.world) == ["x"]


def test_mesh_knows_only_the_groups_it_created() -> None:
    with pytest.raises(KeyError):
        one_rank_mesh().group("cp", "tp")
    with pytest.raises(ValueError, match="no group was created"):
        one_rank_mesh().tp_subgroup((0, 1))
