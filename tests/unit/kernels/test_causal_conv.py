"""The short causal convolution against torch's convolution of each document."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.causal_conv import CAUSAL_CONV, SEGMENT_ROWS, causal_conv
from megatron.kernels.operation import check_kernel
from tests.unit.kernels.doubles import install


def by_document(x: Tensor, weight: Tensor, bias: Tensor | None, runs: Tensor) -> Tensor:
    """Convolve every document of every sequence alone."""
    width = weight.shape[1]
    rows = []
    for sequence, run in zip(x, runs):
        out = []
        for number in run.unique_consecutive():
            padded = F.pad(sequence[run == number].T, (width - 1, 0))
            out.append(F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight))).T)
        rows.append(torch.cat(out)[width - 1 :])
    return torch.stack(rows)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients(width: int, documents: bool, with_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 40, 6, dtype=torch.float64), torch.randn(6, width, dtype=torch.float64)
    bias = torch.randn(6, dtype=torch.float64) if with_bias else None
    runs = (torch.rand(2, 40) < 0.3 * documents).long().cumsum(1)
    leaves = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    ours, theirs = causal_conv(x, weight, bias, runs if documents else None), by_document(x, weight, bias, runs)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    seed = torch.randn_like(ours)
    grads, expected = torch.autograd.grad(ours, leaves, seed), torch.autograd.grad(theirs, leaves, seed)
    torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-12)


def test_rows_are_computed_in_segments() -> None:
    """Each row depends on rows of the segment before, and gives these a gradient."""
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(1, 2 * SEGMENT_ROWS + 9, 2).double(),
        torch.randn(2, 4).double(),
        torch.randn(2).double(),
    )
    runs = (torch.arange(x.shape[1]) > SEGMENT_ROWS).long().unsqueeze(0)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    ours, theirs = causal_conv(x, weight, bias, runs), by_document(x, weight, bias, runs)
    seed = torch.randn_like(ours)
    grads, expected = torch.autograd.grad(ours, leaves, seed), torch.autograd.grad(theirs, leaves, seed)
    torch.testing.assert_close((ours, *grads), (theirs, *expected), rtol=1e-12, atol=1e-12)


def test_other_documents_change_no_bit() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(1, 20, 5), torch.randn(5, 4), torch.randn(5)
    runs, changed = torch.arange(20).unsqueeze(0) // 7, x.clone()
    changed[:, 7:14] = torch.inf
    ours, other = (causal_conv(t, weight, bias, runs) for t in (x, changed))
    kept = (runs != 1)[:, 3:]
    assert torch.equal(ours[kept], other[kept])
    assert not torch.equal(ours[~kept], other[~kept])


def test_only_inputs_are_kept() -> None:
    x, weight = torch.randn(2, 40, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        causal_conv(x, weight, None, None)
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), weight.data_ptr()}


def library(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, activation: str) -> Tensor:
    """A double of causal_conv1d_fn: channels before rows, none before the first row, documents in int32."""
    assert activation == "silu"
    assert x.stride(1) == 1
    assert seq_idx is None or seq_idx.dtype == torch.int32
    runs = torch.zeros_like(x[:, 0], dtype=torch.int32) if seq_idx is None else seq_idx
    padded, before = F.pad(x.mT, (0, 0, weight.shape[1] - 1, 0)), runs[:, :1].expand(-1, weight.shape[1] - 1)
    return causal_conv(padded, weight, bias, torch.cat((before, runs), 1)).mT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_library_is_called_as_it_wants_and_proven(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_documents(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor, activation: str) -> Tensor:
        return library(x, weight, bias, None, activation)

    for double, right in ((library, True), (without_documents, False)):
        install(monkeypatch, "causal_conv1d", causal_conv1d_fn=double)
        kernel = CAUSAL_CONV.candidates["causal_conv1d"]
        wrong = check_kernel(CAUSAL_CONV, kernel.make(), torch.device("cpu"), dtype, kernel.covers)
        assert (wrong is None) is right
