"""Triton's kernels of rows in its interpreter on a CPU, against torch.

Needs Triton, which PyTorch's build for CPUs lacks: ``TRITON_INTERPRET=1 python -m pytest`` with this file.
"""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":  # read when kernels are defined, Triton's own included
    pytest.skip("runs in Triton's interpreter only", allow_module_level=True)
pytest.importorskip("triton")

from megatron.kernels import rows, triton_rows
from megatron.kernels.operation import check_kernel
from megatron.kernels.rows import ROWS, Ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_kernels_pass_their_check(dtype: torch.dtype) -> None:
    assert check_kernel(ROWS, triton_rows.TRITON_ROWS, torch.device("cpu"), dtype) is None


def random_choices(tokens: int, experts: int, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return choices, some of them none, and weights."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :topk]
    dropped = torch.rand(chosen.shape, generator=generator) < 0.2
    return chosen.masked_fill(dropped, experts), torch.rand(chosen.shape, generator=generator)


@pytest.mark.parametrize(
    ("tokens", "experts", "topk"), [(1, 1, 1), (16, 3, 2), (1000, 8, 8), (129, 1023, 3), (50, 2000, 5), (0, 4, 2)]
)
def test_choices_are_placed(tokens: int, experts: int, topk: int) -> None:
    """Also without choices of some experts, and with more experts than a program has."""
    chosen, weights = random_choices(tokens, experts, topk)
    count = chosen.numel() * 9 // 10
    flags = torch.zeros(2, dtype=torch.bool)
    found = triton_rows.place_choices(chosen, weights, 0, experts, count, flags[0])
    expected = rows.place_choices(chosen, weights, 0, experts, count, flags[1])
    assert all(torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)) for a, b in zip(found, expected))
    assert flags[0] == flags[1]


@pytest.mark.parametrize("block", [None, 5, 600])
@pytest.mark.parametrize(
    ("tokens", "local", "ep", "tp", "topk"), [(300, 2, 3, 1, 4), (600, 8, 4, 2, 8), (0, 4, 2, 1, 2)]
)
def test_rows_are_sent(tokens: int, local: int, ep: int, tp: int, topk: int, block: int | None) -> None:
    """With blocks that are too small, that are padded, and without."""
    chosen, weights = random_choices(tokens, local * ep, topk)
    flags = torch.zeros(2, dtype=torch.bool)
    arguments = chosen, weights, Ranks(local, ep, tp), block
    found = triton_rows.send_rows(*arguments, None if block is None else flags[0])
    expected = rows.send_rows(*arguments, None if block is None else flags[1])
    total = tp * int(expected.counts[0].sum()) if block is None else len(expected.source)
    for a, b in zip((found.source, found.choices), (expected.source, expected.choices)):
        assert torch.equal(a[:total].nan_to_num(-1), b[:total].nan_to_num(-1))
    assert torch.equal(found.places, expected.places)
    assert torch.equal(found.counts, expected.counts)
    assert flags[0] == flags[1]
    assert bool(flags[0]) == (block == 5 and tokens > 0)


def test_places_of_another_order_fail_the_check() -> None:
    def backwards(experts: torch.Tensor, weights: torch.Tensor, *more: object) -> rows.PlacedChoices:
        found = rows.place_choices(experts.flip(0), weights.flip(0), *more)  # type: ignore[arg-type]
        return found._replace(source=len(experts) - 1 - found.source, places=found.places.flip(0))

    wrong = triton_rows.TRITON_ROWS._replace(place_choices=backwards)
    assert "differs" in str(check_kernel(ROWS, wrong, torch.device("cpu"), torch.float32))
