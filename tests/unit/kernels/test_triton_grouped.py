"""Grouped linears in Triton's interpreter on a CPU, against stock PyTorch in fp64.

Needs Triton, which PyTorch's build for CPUs lacks: ``TRITON_INTERPRET=1 python -m pytest`` with this file.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":  # read when kernels are defined, Triton's own included
    pytest.skip("runs in Triton's interpreter only", allow_module_level=True)
pytest.importorskip("triton")

from triton.runtime import interpreter

from megatron.kernels import triton_grouped
from megatron.kernels.fp8 import Float8Recipe
from megatron.kernels.grouped_fp8 import grouped_fp8_operation
from megatron.kernels.grouped_linear import GROUPED_LINEAR
from megatron.kernels.operation import check_kernel
from megatron.kernels.triton_grouped import MatmulTile

CPU = torch.device("cpu")
OURS = triton_grouped.grouped_linear


@pytest.fixture(autouse=True)
def as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        tensor.__index__ = lambda self: self.handle.data.item()  # NumPy 2.5 rejects int() of an array of one element

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    convert, formats = interpreter._convert_float, {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        """Round to nearest, as compiled kernels do; the interpreter truncates."""
        if str(target) not in formats:
            return convert(values, source, target, mode)
        return torch.from_numpy(values).to(formats[str(target)]).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tile", [None, MatmulTile(32, 64, 32, 4, 1)])
def test_the_kernels_pass_their_check(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tile: MatmulTile | None
) -> None:
    """The interpreter does not multiply in bf16. Small tiles are many, and the last of each kind incomplete."""
    if tile is not None:
        monkeypatch.setattr(triton_grouped, "_tile", lambda *_: tile)
    assert check_kernel(GROUPED_LINEAR, OURS, CPU, dtype) is None


@pytest.mark.parametrize("recipe", [("hybrid", "rowwise"), ("e4m3", "rowwise"), ("e4m3", "blockwise")])
def test_products_in_fp8_pass_their_check(recipe: tuple[str, str]) -> None:
    operation = grouped_fp8_operation(Float8Recipe(*recipe))
    assert check_kernel(operation, triton_grouped.grouped_fp8, CPU, torch.float32) is None


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_stays_so_when_quantised(value: float) -> None:
    x, offsets = torch.ones(3, 40), torch.tensor([3], dtype=torch.int32)
    x[1, 7] = value
    rows = triton_grouped.quantize_rows(x, None, torch.float8_e4m3fn, offsets).dequantize()
    assert rows.isfinite().all(1).tolist() == [True, False, True]


def test_results_are_equal_to_the_bit_when_repeated() -> None:
    generator = torch.Generator().manual_seed(0)
    x, dy, weight = (torch.randn(shape, generator=generator) for shape in ((90, 40), (90, 24), (3, 24, 40)))
    offsets, outcomes = torch.tensor([50, 50, 80], dtype=torch.int32), []
    for _ in range(2):
        target = torch.zeros_like(weight)
        OURS.weight_gradient(target, x, dy, offsets)
        rows = OURS.forward(x, weight, offsets)[:80], OURS.input_gradient(dy, weight, offsets)[:80]
        outcomes.append([target, *rows, OURS.bias_gradient(dy, offsets, None)])
    assert all(map(torch.equal, *outcomes))


def test_no_rows() -> None:
    weight, offsets = torch.ones(3, 24, 40), torch.zeros(3, dtype=torch.int32)
    x, dy, target = torch.empty(0, 40), torch.empty(0, 24), torch.full_like(weight, torch.nan)
    assert OURS.forward(x, weight, offsets).shape == (0, 24)
    OURS.weight_gradient(target, x, dy, offsets, beta=0.0)
    assert not target.any()
    assert not OURS.bias_gradient(dy, offsets, None).any()


def shifted(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """A fault: the first row of each expert is counted to the one before."""
    return OURS.forward(x, weight, (offsets + 1).clamp(max=len(x)).int())


@pytest.mark.parametrize(
    "faulty",
    [
        OURS._replace(forward=shifted),
        OURS._replace(
            weight_gradient=lambda target, x, dy, offsets, beta=1.0: OURS.weight_gradient(target, x, dy, offsets)
        ),
        OURS._replace(bias_gradient=lambda dy, offsets, factor: OURS.bias_gradient(dy, offsets, None)),
    ],
)
def test_a_fault_is_noticed(faulty: Any) -> None:
    assert check_kernel(GROUPED_LINEAR, faulty, CPU, torch.float32) is not None
