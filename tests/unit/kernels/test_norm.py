"""Norms against their formulas, and apex's behind its double. Not run against apex here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.kernels.norm import NORM, add_norm, norm
from megatron.kernels.operation import check_kernel
from tests.unit.kernels.doubles import ApexNorms, install

EPS = 1e-3


def by_formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    centred = x if bias is None else x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    return y if bias is None else y + bias


@pytest.mark.parametrize("with_bias", [False, True])
def test_formula_values_and_gradients(with_bias: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 5, 3, 16, dtype=torch.float64)
    weight, bias = torch.randn(2, 16, dtype=torch.float64)
    bias = bias if with_bias else None
    inputs = [t.requires_grad_() for t in (x, y, weight, bias) if t is not None]
    total, normed = add_norm(x, y, weight, bias, EPS)
    seeds = torch.randn_like(total), torch.randn_like(normed)
    ours = torch.autograd.grad((total, normed), inputs, seeds)
    exact = torch.autograd.grad((x + y, by_formula(x + y, weight, bias)), inputs, seeds)
    torch.testing.assert_close(normed, by_formula(x + y, weight, bias), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)
    assert torch.equal(normed, norm(total, weight, bias, EPS))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_weights_are_rounded_once(dtype: torch.dtype, with_bias: bool) -> None:
    """Summed over rows in 16 bits they would be off by several percent."""
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, 4096, 16, generator=generator).to(dtype)
    weight, bias = torch.randn(2, 16, generator=generator).to(dtype)
    inputs = [x, weight, bias] if with_bias else [x, weight]
    ours = [t.clone().requires_grad_() for t in inputs]
    exact = [t.double().requires_grad_() for t in inputs]
    norm(ours[0], ours[1], ours[2] if with_bias else None, EPS).backward(dy)
    by_formula(exact[0], exact[1], exact[2] if with_bias else None).backward(dy.double())
    for mine, right in zip(ours, exact):
        assert mine.grad is not None
        assert right.grad is not None
        error = (mine.grad.double() - right.grad).norm() / right.grad.norm()
        assert error < torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_apex_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    double = ApexNorms()
    install(
        monkeypatch,
        "apex.normalization.fused_layer_norm",
        fused_layer_norm_affine=double.fused_layer_norm_affine,
        fused_rms_norm_affine=double.fused_rms_norm_affine,
    )
    assert check_kernel(NORM, NORM.candidates["apex"].make(), torch.device("cpu"), dtype) is None
    assert set(double.calls) == {"layer", "rms"}


def test_apex_is_missing_where_it_cannot_run() -> None:
    missing = NORM.candidates["apex"].missing
    assert "on a GPU" in str(missing(torch.device("cpu"), torch.bfloat16))
    assert "on a GPU" in str(missing(torch.device("cuda"), torch.float64))
    assert "cannot be imported" in str(missing(torch.device("cuda"), torch.bfloat16))
