"""Grouped linears: the products of the loop over experts, and of the layer, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.kernels.grouped_linear import GROUPED_LINEAR

IN, OUT, EXPERTS = 5, 6, 4

COUNTS = {
    "all have rows": [3, 1, 2, 4],
    "some have none": [0, 4, 0, 3],
    "one has all": [0, 0, 7, 0],
    "no rows": [0, 0, 0, 0],
    "more than a tile": [40, 0, 17, 3],
}


def operands(counts: list[int], padding: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, output gradients, weights, factors, and offsets; the padding holds NaN."""
    generator, rows = torch.Generator().manual_seed(0), sum(counts) + padding
    shapes = (rows, IN), (rows, OUT), (EXPERTS, OUT, IN), (rows,)
    x, dy, weight, factor = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    for t in (x, dy, factor):
        t[sum(counts) :] = torch.nan
    return x, dy, weight, factor, torch.tensor(counts).cumsum(0, dtype=torch.int32)


def experts_of(counts: list[int]) -> list[int]:
    return [e for e, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("torch", torch.float64), ("torch", torch.bfloat16), ("onednn", torch.float32), ("onednn", torch.bfloat16)],
)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_products_match_sums_over_rows(counts: list[int], name: str, dtype: torch.dtype, padding: int) -> None:
    x, dy, weight, factor, offsets = operands(counts, padding, dtype)
    kernel, end = GROUPED_LINEAR.candidates[name].make(), sum(counts)
    wide = torch.promote_types(dtype, torch.float32)
    first, added = torch.full((EXPERTS, OUT, IN), torch.nan, dtype=wide), torch.ones(EXPERTS, OUT, IN, dtype=wide)
    kernel.weight_gradient(first, x, dy, offsets, beta=0.0)
    kernel.weight_gradient(added, x, dy, offsets)
    y, dx = kernel.forward(x, weight, offsets), kernel.input_gradient(dy, weight, offsets)
    db, dp = kernel.bias_gradient(dy, offsets, None), kernel.bias_gradient(dy, offsets, factor)
    assert (y.shape, dx.shape) == ((end + padding, OUT), (end + padding, IN))

    expected_dw, expected_db, expected_dp = (torch.zeros(EXPERTS, OUT, n, dtype=torch.float64) for n in (IN, 1, 1))
    tolerances = {torch.float64: (1e-12, 1e-13), torch.float32: (1e-6, 1e-5), torch.bfloat16: (8e-3, 1e-2)}
    close = dict(zip(("rtol", "atol"), tolerances[dtype]))
    for row, e in enumerate(experts_of(counts)):
        x_r, dy_r, w, p = x[row].double(), dy[row].double(), weight[e].double(), factor[row].double()
        torch.testing.assert_close(y[row].double(), w @ x_r, **close)
        torch.testing.assert_close(dx[row].double(), dy_r @ w, **close)
        expected_dw[e] += torch.outer(dy_r, x_r)
        expected_db[e, :, 0] += dy_r
        expected_dp[e, :, 0] += dy_r * p
    exact = {"rtol": 1e-12, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 1e-6, "atol": 1e-5}
    torch.testing.assert_close(first.double(), expected_dw, **exact)
    torch.testing.assert_close(added.double(), expected_dw + 1, **exact)
    torch.testing.assert_close(db.double(), expected_db.squeeze(-1), **exact)
    torch.testing.assert_close(dp.double(), expected_dp.squeeze(-1), **close)
    assert (db.dtype, dp.dtype) == (wide, wide)
