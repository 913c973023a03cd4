"""Triton kernels in Triton's interpreter on a CPU, against stock PyTorch in fp64.

Needs Triton, which PyTorch's build for CPUs lacks: ``TRITON_INTERPRET=1 python -m pytest`` with this file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":  # read when kernels are defined, Triton's own included
    pytest.skip("runs in Triton's interpreter only", allow_module_level=True)
pytest.importorskip("triton")


from megatron.kernels import triton_latent_qkv
from megatron.kernels import triton_regions as regions
from megatron.kernels.activation import TRITON_ACTIVATIONS, WeightedRows, activation
from megatron.kernels.latent_qkv import latent_qkv
from megatron.kernels.norm import add_norm, norm
from megatron.kernels.qkv import HeadNorms, RotaryCosSin, split_qkv

ROWS, BATCH = 5, 3


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rows per program, several tiles per row, and the last of each incomplete."""
    monkeypatch.setattr(regions, "PROGRAMS", 4)
    monkeypatch.setattr(regions, "TILE", 32)
    monkeypatch.setattr(regions, "QKV_TILE", 32)
    monkeypatch.setattr(triton_latent_qkv, "TILE", 64)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def agree(ours: Callable[..., Any], eager: Callable[..., Any], inputs: Sequence[Tensor | None], *options: Any) -> None:
    """Compare values and all gradients in fp32; gradients of outputs are strided, as attention's are."""
    outcomes = []
    for function, dtype in ((ours, torch.float32), (eager, torch.float64)):
        leaves = [t if t is None else t.to(dtype).requires_grad_() for t in inputs]
        out = function(*leaves, *options)
        outputs = out if isinstance(out, tuple) else (out,)
        seeds = [draw(*y.shape[1::-1], *y.shape[2:]).transpose(0, 1).to(dtype) for y in outputs]
        outcomes.append([*outputs, *torch.autograd.grad(outputs, [t for t in leaves if t is not None], seeds)])
    for mine, right in zip(*outcomes, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("width", [48, 64])
def test_norms(width: int, with_bias: bool) -> None:
    x, y = draw(ROWS, BATCH, width), draw(ROWS, BATCH, width).flip(0)
    bias = draw(width).flip(0) if with_bias else None
    agree(regions.norm, norm, (x, draw(width), bias), 1e-5)
    part = draw(ROWS, BATCH, width + 8)
    ours, eager = (lambda x, *rest, f=f: f(x[..., 3 : width + 3], *rest) for f in (regions.norm, norm))
    agree(ours, eager, (part, draw(width), bias), 1e-5)  # rows with a gap between them
    agree(ours, eager, (part[:1].transpose(0, 1), draw(width), bias), 1e-5)
    agree(regions.norm, norm, (x[:1].transpose(0, 1), draw(width), bias), 1e-5)
    agree(regions.add_norm, add_norm, (x, y, None, draw(width), bias), 1e-5)
    agree(regions.add_norm, add_norm, (x, y, draw(width), draw(width), bias), 1e-5)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", TRITON_ACTIVATIONS)
def test_activations(name: str, with_bias: bool) -> None:
    agree(regions.activation, activation, (draw(ROWS, BATCH, 80), draw(80) if with_bias else None), name)


def test_an_activation_of_no_rows() -> None:
    x = torch.empty(0, 8, requires_grad=True)
    regions.activation(x, None, "swiglu").sum().backward()
    assert x.grad is not None


ANGLES = [None, (12, 1, False), (8, BATCH, False), (8, 1, True), (12, BATCH, True)]
"""Any cosines and sines, for all or some channels, per sample or for all samples."""


def rotary_of(angles: tuple[int, int, bool] | None, x: Tensor) -> RotaryCosSin | None:
    if angles is None:
        return None
    width, batch, interleaved = angles
    cos, sin = (draw(ROWS, batch, 1, width + i)[..., :width].to(x.dtype) for i in range(2))
    return RotaryCosSin(cos, sin, interleaved)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("angles", ANGLES)
def test_split(angles: tuple[int, int, bool] | None, with_bias: bool) -> None:
    qkv, bias = draw(ROWS, BATCH, 2 * 5 * 12), draw(2 * 5 * 12) if with_bias else None

    def split(function: Any) -> Callable[..., Any]:
        return lambda x, bias: function(x, bias, (2, 12), None, rotary_of(angles, x))

    agree(split(regions.split_qkv), split(split_qkv), (qkv, bias))


@pytest.mark.parametrize("angles", [None, (8, 1, False), (8, BATCH, True)])
def test_latent_heads(angles: tuple[int, int, bool] | None) -> None:
    """Three heads of 12 plain and 8 shared channels, and values wider than both; the shared ones lie in other rows."""
    q, kv, latents = draw(ROWS, BATCH, 3 * 20), draw(ROWS, BATCH, 3 * 36), draw(ROWS, BATCH, 8 + 5)

    def split(function: Any) -> Callable[..., Any]:
        def run(q: Tensor, kv: Tensor, latents: Tensor) -> Any:
            rotary = rotary_of(angles, q)
            return function(q, kv, latents[..., 5:], 12, rotary, rotary)

        return run

    agree(split(triton_latent_qkv.latent_qkv), split(latent_qkv), (q, kv, latents))


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("angles", ANGLES)
def test_split_with_norms(angles: tuple[int, int, bool] | None, centred: bool) -> None:
    """RMSNorm, and LayerNorm behind a projection with a bias."""
    qkv, bias = draw(ROWS, BATCH, 2 * 5 * 12), draw(2 * 5 * 12) if centred else None
    (q, q_bias), (k, k_bias) = ((draw(12 + i)[:12], draw(14 + i)[:12] if centred else None) for i in range(2))

    def split(function: Any) -> Callable[..., Any]:
        def run(x: Tensor, bias: Tensor | None, *norms: Any) -> Any:
            return function(x, bias, (2, 12), HeadNorms(*norms, 1e-5), rotary_of(angles, x))

        return run

    agree(split(regions.split_qkv), split(split_qkv), (qkv, bias, q, q_bias, k, k_bias))


@pytest.mark.parametrize("name", TRITON_ACTIVATIONS)
def test_weighted_activations(name: str) -> None:
    """Rows after the last are not read, and their results not compared."""

    def padded(function: Callable[..., Tensor], x: Tensor, weights: Tensor) -> Tensor:
        x, weights = (torch.cat([t, torch.full_like(t[:2], torch.nan)]) for t in (x, weights))
        rows = WeightedRows(weights, torch.tensor([7], dtype=torch.int32))
        return function(x, None, name, None, 0.0, rows)[:7].unsqueeze(1)

    agree(lambda *t: padded(regions.activation, *t), lambda *t: padded(activation, *t), (draw(7, 80), draw(7)))
