"""The chunked scan of Mamba-2 against its recurrence, token by token, in fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.kernels.operation import check_kernel
from megatron.kernels.state_space import SEGMENT_CHUNKS, STATE_SPACE, decay_of_all, read_state, state_space
from tests.unit.kernels.doubles import install

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def by_token(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, runs: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``state = exp(dt a) state + dt x b^T`` and ``y = state c`` of one token after the other."""
    copies, outputs = x.shape[2] // b.shape[2], []
    b, c = (t.repeat_interleave(copies, 2) for t in (b, c))
    state = x.new_zeros(*x[:, 0].shape, b.shape[3]) if state is None else state
    for t in range(x.shape[1]):
        if runs is not None and t:
            state = state * (runs[:, t] == runs[:, t - 1]).to(x)[:, None, None, None]
        written = torch.einsum("bn,bnp,bnd->bnpd", dt[:, t], x[:, t], b[:, t])
        state = (dt[:, t] * a).exp()[..., None, None] * state + written
        outputs.append(torch.einsum("bnpd,bnd->bnp", state, c[:, t]))
    return torch.stack(outputs, 1), state


def draw(length: int, documents: bool, samples: int = 2) -> tuple[Inputs, Tensor | None]:
    """Return inputs of four heads in two groups, and the numbers of documents of ten tokens on average."""
    heads, groups = 4, 2
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, b, c = normal(samples, length, heads, 3), *(normal(samples, length, groups, 5) for _ in range(2))
    dt, a = normal(samples, length, heads).exp() / 8, -normal(heads).exp()
    ends = torch.rand(samples, length, generator=generator) < 0.1
    return (x, dt, a, b, c), ends.long().cumsum(1) if documents else None


def agree(ours: Any, theirs: Any, leaves: Any, limit: float = 1e-12) -> None:
    """Compare outputs, and the gradients of all inputs for random gradients of all outputs."""
    seeds = [torch.randn_like(t) for t in theirs]
    grads = (torch.autograd.grad(of, leaves, seeds) for of in (ours, theirs))
    for mine, right in zip(*((*of, *grad) for of, grad in zip((ours, theirs), grads)), strict=True):
        assert (mine - right).norm() <= limit * right.norm()


SHORT = [(1, 1), (1, 64), (7, 4), (64, 64), (130, 1), (300, 64)]
LONG = [*itertools.product((1, 2, 5, 63, 64, 65, 127, 300, 1000, 2049, 4096), (1, 3, 16, 64, 128, 256))]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("length", "chunk"), [*SHORT, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG)])
def test_chunks_compute_the_recurrence(length: int, chunk: int, documents: bool) -> None:
    inputs, runs = draw(length, documents)
    leaves = [t.requires_grad_() for t in inputs]
    agree(state_space(*inputs, runs, chunk), by_token(*inputs, runs), leaves)


def test_segments_compute_the_recurrence() -> None:
    """More chunks than are computed at a time, and one document over the end of a segment."""
    inputs, runs = draw(2 * SEGMENT_CHUNKS + 1, True)
    assert runs is not None
    runs[:, SEGMENT_CHUNKS - 1 : SEGMENT_CHUNKS + 2] = runs[:, SEGMENT_CHUNKS - 1, None]
    runs[1] = 0
    leaves = [t.requires_grad_() for t in inputs]
    agree(state_space(*inputs, runs, 1), by_token(*inputs, runs), leaves)


@pytest.mark.parametrize("documents", [False, True])
def test_a_scan_continues_from_a_state(documents: bool) -> None:
    """In two parts, of which the second reads the state of the first; gradients flow through it."""
    inputs, runs = draw(40, documents)
    x, dt, a, b, c = leaves = [t.requires_grad_() for t in inputs]
    firsts, seconds = ((slice(None), slice(0, 13)), (slice(None), slice(13, None)))
    y1, state = state_space(x[firsts], dt[firsts], a, b[firsts], c[firsts], runs if runs is None else runs[firsts], 8)
    y2, after = state_space(
        x[seconds], dt[seconds], a, b[seconds], c[seconds], runs if runs is None else runs[seconds], 8
    )
    seen = None if runs is None else runs[:, 13:] == runs[:, 12:13]
    read = read_state(state, dt[seconds], a, c[seconds], seen)
    ours = torch.cat((y1, y2 + read), 1), after + decay_of_all(dt[seconds], a, seen)[..., None, None] * state
    agree(ours, by_token(*inputs, runs), leaves)


def test_other_documents_change_no_bit() -> None:
    """Neither outputs nor gradients, wherever chunks begin."""
    (x, dt, a, b, c), _ = draw(100, False, samples=1)
    runs, kept = (torch.arange(100) // 23).unsqueeze(0), torch.arange(100) // 23 != 1
    found = []
    for factor in (1.0, 7.0):
        changed = [torch.where(kept.view(1, -1, *(1,) * (t.dim() - 2)), t, factor * t) for t in (x, dt, b, c)]
        leaves = [t.float().requires_grad_() for t in changed]
        y, state = state_space(leaves[0], leaves[1], a.float(), leaves[2], leaves[3], runs, 16)
        grads = torch.autograd.grad((y, state), leaves, (changed[0].float(), torch.ones_like(state)))
        found.append([state, *(t[:, kept] for t in (y, *grads)), y[:, ~kept]])
    *same, other = [torch.equal(*pair) for pair in zip(*found)]
    assert all(same)
    assert not other


def test_only_inputs_are_kept() -> None:
    inputs, runs = draw(50, True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        state_space(*(t.requires_grad_() for t in inputs), runs, 16)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (*inputs, runs) if t is not None}


def library(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk_size: int, **options: Any) -> Any:
    """A double of mamba_chunk_scan_combined, which computes in fp32."""
    seq_idx = options["seq_idx"]
    assert (dt.dtype, options["return_final_states"]) == (torch.float32, True)
    assert seq_idx is None or seq_idx.dtype == torch.int32
    return state_space(x, dt, a, b, c, seq_idx, chunk_size)


def test_the_library_is_called_as_it_wants_and_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_documents(*inputs: Any, **options: Any) -> Any:
        return library(*inputs, **options | {"seq_idx": None})

    def decays_twice(x: Tensor, dt: Tensor, a: Tensor, *others: Any, **options: Any) -> Any:
        return library(x, dt, 2 * a, *others, **options)

    for double, right in ((library, True), (without_documents, False), (decays_twice, False)):
        install(monkeypatch, "mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined=double)
        kernel = STATE_SPACE.candidates["mamba_ssm"]
        wrong = check_kernel(STATE_SPACE, kernel.make(), torch.device("cpu"), torch.bfloat16, kernel.covers)
        assert (wrong is None) is right


def test_error_of_16_bits() -> None:
    """Sums are in fp32, so that outputs are as exact as the rounding of the inputs and of the results."""
    (x, dt, a, b, c), runs = draw(1024, True)
    rounded = [t.bfloat16() for t in (x, b, c)]
    y, state = state_space(rounded[0], dt.float(), a.float(), *rounded[1:], runs, 128)
    exact, last = by_token(rounded[0].double(), dt, a, *(t.double() for t in rounded[1:]), runs)
    assert (y.double() - exact).norm() < 2e-3 * exact.norm()
    assert (state.double() - last).norm() < 1e-6 * last.norm()


def test_steep_decays_are_finite() -> None:
    """Also where the decay between two documents, which is not used, would overflow, and in backward."""
    (x, _, _, b, c), runs = draw(200, True)
    leaves = [t.float().requires_grad_() for t in (x, torch.full((2, 200, 4), 4.0), torch.full((4,), -16.0), b, c)]
    for of_documents in (runs, None):
        outputs = state_space(*leaves, of_documents, 64)
        grads = torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs])
        assert all(t.isfinite().all() for t in (*outputs, *grads))


def test_steep_decays_leave_no_rounding() -> None:
    """In fp32, the outputs of later tokens of gentle decays are as exact as others, in the chunk and after it."""
    (x, dt, a, b, c), _ = draw(300, False)
    inputs = x, torch.where(torch.arange(300).view(1, -1, 1) < 100, 100.0, dt / 100), a, b, c
    outputs = state_space(*(t.float() for t in inputs), None, 64), by_token(*inputs)
    ours, exact = (torch.cat((y[:, 100:].flatten(), state.flatten())).double() for y, state in outputs)
    assert (ours - exact).norm() < 1e-6 * exact.norm()
