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

from megatron.kernels import triton_rows
from megatron.kernels.operation import check_kernel
from megatron.kernels.rows import ROWS, SortedKeys, sort_keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_kernels_pass_their_check(dtype: torch.dtype) -> None:
    assert check_kernel(ROWS, triton_rows.TRITON_ROWS, torch.device("cpu"), dtype) is None


@pytest.mark.parametrize(("count", "groups"), [(1, 1), (16, 3), (1000, 8), (700, 300), (129, 1023), (50, 2000), (0, 4)])
def test_keys_are_sorted(count: int, groups: int) -> None:
    """Also without keys of some numbers, with the number above the groups, and with more numbers than a program has."""
    keys = torch.randint(0, groups + 1, (count,), generator=torch.Generator().manual_seed(0))
    found, expected = triton_rows.sort_keys(keys, groups, groups), sort_keys(keys, groups, groups)
    assert all(map(torch.equal, found, expected))


def test_an_unstable_order_fails_the_check() -> None:
    def backwards(keys: torch.Tensor, groups: int, most: int) -> SortedKeys:
        found = sort_keys(keys.flatten().flip(0), groups, most)
        order = len(found.order) - 1 - found.order
        return SortedKeys(order, found.places.flip(0), found.ends)

    wrong = triton_rows.TRITON_ROWS._replace(sort_keys=backwards)
    assert "differs" in str(check_kernel(ROWS, wrong, torch.device("cpu"), torch.float32))
