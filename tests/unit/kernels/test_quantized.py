"""Blockwise quantisation: the codes of the paper, and errors of at most half a step."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from megatron.kernels.quantized import dequantize, normal_float_codes, quantize
from megatron.planner.memory import CONVERTING_BYTES
from tests.unit.planner.test_activations import LiveMemory

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of appendix E of arXiv 2305.14314."""


def test_codes_match_the_paper() -> None:
    assert normal_float_codes() == pytest.approx(NF4, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("precision", "bytes_of_block"), [("int8", 68), ("nf4", 36)])
def test_errors_are_at_most_half_a_step(precision: str, bytes_of_block: int, dtype: torch.dtype) -> None:
    weight = torch.randn(48, 192, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3, 64:128] = 0.0
    weight[5] *= 1e-6
    packed = quantize(weight, precision)
    assert (packed.dtype, tuple(packed.shape)) == (torch.uint8, (48, 3 * bytes_of_block))
    found = dequantize(packed, precision, dtype)
    assert (found.dtype, found.shape) == (dtype, weight.shape)
    largest = weight.double().unflatten(1, (3, 64)).abs().amax(2, keepdim=True)
    error = (found.double() - weight.double()).unflatten(1, (3, 64)).abs()
    step = 1 / 127 if precision == "int8" else max(b - a for a, b in pairwise(NF4))
    rounding = 2 * torch.finfo(torch.promote_types(dtype, torch.float32) if dtype != torch.bfloat16 else dtype).eps
    assert (error <= largest * (step / 2 + max(rounding, 1e-6))).all()
    assert error.max() > largest.max() * step / 5
    nearest = torch.tensor(NF4, dtype=torch.float64) if precision == "nf4" else torch.arange(-127, 128) / 127.0
    values = weight.double().unflatten(1, (3, 64)) / largest.where(largest > 0, 1.0)
    best = nearest[(values.unsqueeze(-1) - nearest).abs().argmin(-1)] * largest
    torch.testing.assert_close(found.double(), best.flatten(1), rtol=4 * rounding + 1e-6, atol=0)


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_memory_of_a_conversion_matches_the_forecast(precision: str) -> None:
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    packed = quantize(weight, precision)
    with LiveMemory() as memory:
        dequantize(packed, precision, torch.bfloat16)
    assert memory.peak == pytest.approx(CONVERTING_BYTES * weight.numel(), rel=0.01)


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_a_part_of_the_inputs_is_a_part_of_the_bytes(precision: str) -> None:
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    whole = quantize(weight, precision)
    parts = [quantize(part, precision) for part in weight.chunk(2, 1)]
    assert torch.equal(torch.cat(parts, 1), whole)
