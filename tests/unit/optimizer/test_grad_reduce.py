"""Sums over ranks: exact where nothing is rounded, within bf16's bound where the wire is narrow, equal everywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.config.parallel import ParallelConfig
from megatron.distributed.comm import Group
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.optimizer.grad_buffer import start_grad_all_reduce, start_grad_reduce_scatter
from tests.distributed.pool import Pool

UNIT = 2.0**-8
"""Half of a step of bf16, relative to the number: what rounding to the nearest may cost."""


def addend(rank: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Numbers of all sizes and both signs: sums that cancel."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(elements, generator=generator, dtype=torch.float64)
    return (x * 10 ** (4 * torch.rand(elements, generator=generator, dtype=torch.float64) - 2)).to(dtype)


def sums(rank: int, size: int, dtype: torch.dtype, wire: torch.dtype, elements: int) -> tuple[Tensor, Tensor, bool]:
    """The part of a reduce-scatter, an all-reduce, and whether the addends are as they were after the former."""
    group = Mesh(Layout.from_config(ParallelConfig(), size), rank).dp_cp
    x = addend(rank, elements, dtype)
    given = x.clone()
    part = start_grad_reduce_scatter(x, group, wire).wait()
    untouched = torch.equal(x, given)
    return part, start_grad_all_reduce(x, group, wire).wait(), untouched


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_wide_wire_gives_the_same_bits_in_parts_and_as_a_whole(pool: Pool, size: int, dtype: torch.dtype) -> None:
    elements = 64 * size * 3
    ranks = pool.run(size, sums, dtype, dtype, elements)
    exact = torch.stack([addend(r, elements, torch.float64).to(dtype).double() for r in range(size)]).sum(0)
    assert all(untouched for *_, untouched in ranks)
    assert torch.equal(torch.cat([part for part, *_ in ranks]), ranks[0][1])
    assert all(torch.equal(whole, ranks[0][1]) for _, whole, _ in ranks)
    magnitude = torch.stack([addend(r, elements, torch.float64).abs() for r in range(size)]).sum(0)
    assert ((ranks[0][1].double() - exact).abs() <= size * torch.finfo(dtype).eps * magnitude).all()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_narrow_wire_rounds_every_addend_once(pool: Pool, size: int, dtype: torch.dtype) -> None:
    """Parts are sums in the order of the ranks, to the bit; a whole sum is rounded once more on its way back."""
    elements = 64 * size * 3
    ranks = pool.run(size, sums, dtype, torch.bfloat16, elements)
    addends = [addend(r, elements, dtype) for r in range(size)]
    expected = addends[0].bfloat16().to(dtype)
    for x in addends[1:]:
        expected = expected + x.bfloat16().to(dtype)
    parts = torch.cat([part for part, *_ in ranks])
    assert torch.equal(parts, expected)
    assert all(untouched for *_, untouched in ranks)
    assert all(torch.equal(whole, expected.bfloat16().to(dtype)) for _, whole, _ in ranks)
    exact = torch.stack([x.double() for x in addends]).sum(0)
    bound = UNIT * torch.stack([x.double().abs() for x in addends]).sum(0) * (1 + 1e-6)
    assert ((parts.double() - exact).abs() <= bound).all()
    assert ((ranks[0][1].double() - exact).abs() <= bound + UNIT * (exact.abs() + bound)).all()


def test_a_rank_alone_rounds_nothing() -> None:
    x = addend(0, 64, torch.float32)
    for start in (start_grad_reduce_scatter, start_grad_all_reduce):
        assert start(x, Group(), torch.bfloat16).wait() is x


def test_a_sum_of_many_small_numbers_is_not_lost_in_bf16(pool: Pool) -> None:
    """1 and three times 2^-9: added up in bf16, the sum would be 1."""
    totals = pool.run(4, small, 256)
    assert all((total == 1 + 3 * 2.0**-9).all() for total in totals)


def small(rank: int, size: int, elements: int) -> Tensor:
    group = Mesh(Layout.from_config(ParallelConfig(), size), rank).dp_cp
    x = torch.full((elements,), 1.0 if rank == 0 else 2.0**-9)
    return start_grad_reduce_scatter(x, group, torch.bfloat16).wait()
