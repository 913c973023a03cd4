"""The gated delta rule in chunks against the recurrence, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.delta_rule import GATED_DELTA_RULE, gated_delta_rule, transition
from megatron.kernels.operation import check_kernel
from tests.unit.kernels.doubles import install

Rule = Callable[..., tuple[Tensor, Tensor]]


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, runs: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The rule as its definition has it: ``S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T``."""
    (batch, length, keys, channels), (heads, width) = k.shape, v.shape[2:]
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q, k = (t.repeat_interleave(heads // keys, 2) for t in (q / channels**0.5, k))
    now = v.new_zeros(batch, heads, channels, width) if state is None else state
    unit, outputs = torch.eye(channels, dtype=v.dtype), []
    for t in range(length):
        if runs is not None and t > 0:
            now = now * (runs[:, t] == runs[:, t - 1])[:, None, None, None]
        b = beta[:, t, :, None, None]
        forget = log_decay[:, t, :, None, None].exp() * (unit - b * k[:, t, :, :, None] * k[:, t, :, None, :])
        now = forget @ now + b * k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append((q[:, t, :, None, :] @ now).squeeze(2))
    return torch.stack(outputs, 1), now


def inputs_of(length: int, batch: int = 2, keys: int = 2, copies: int = 2, d: int = 5, v: int = 7) -> list[Tensor]:
    """Queries, keys, values, decays and strengths before their activations, and a state."""
    generator, heads = torch.Generator().manual_seed(length), keys * copies
    shapes = [(batch, length, keys, d), (batch, length, keys, d), (batch, length, heads, v)]
    shapes += [(batch, length, heads), (batch, length, heads), (batch, heads, d, v)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def documents(length: int, batch: int = 2, share: float = 0.1) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return (torch.rand(batch, length, generator=generator) < share).cumsum(1)


def outcome(rule: Rule, t: list[Tensor], runs: Tensor | None, with_state: bool, **sizes: int) -> list[Tensor]:
    """Outputs, the state after the tokens, and the gradients of all inputs."""
    wide = torch.promote_types(t[0].dtype, torch.float32)
    log_decay, beta, state = -F.softplus(t[3].to(wide)), t[4].to(wide).sigmoid(), t[5].to(wide)
    y, state = rule(*t[:3], log_decay, beta, runs, state if with_state else None, **sizes)
    generator = torch.Generator().manual_seed(0)
    seeds = [torch.randn(out.shape, generator=generator).bfloat16().to(out.dtype) for out in (y, state)]
    return [y, state, *torch.autograd.grad((y, state), t[: 5 + with_state], seeds)]


def compare(length: int, chunk: int, segment: int, with_documents: bool, with_state: bool) -> None:
    inputs, runs = inputs_of(length), documents(length) if with_documents else None
    ours = outcome(gated_delta_rule, inputs, runs, with_state, chunk=chunk, segment=segment)
    for found, right in zip(ours, outcome(recurrence, inputs, runs, with_state), strict=True):
        assert (found - right).norm() <= 1e-12 * right.norm() + 1e-14


def test_steep_decays_leave_no_rounding() -> None:
    """In fp32, the outputs of later tokens of gentle decays in the chunk are as exact as others."""
    q, k, v, log_decay, beta, _ = (t.detach() for t in inputs_of(60))
    log_decay = torch.where(torch.arange(60).view(1, -1, 1) < 30, -100.0, -log_decay.exp() / 100)
    inputs = q, k, v, log_decay, beta.sigmoid()
    (ours, _), (exact, _) = gated_delta_rule(*(t.float() for t in inputs)), recurrence(*inputs, None, None)
    assert (ours.double() - exact)[:, 30:].norm() < 1e-6 * exact[:, 30:].norm()


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize(("length", "chunk", "segment"), [(1, 64, 16), (7, 7, 1), (65, 64, 16), (90, 8, 3)])
def test_chunks_compute_the_recurrence(
    length: int, chunk: int, segment: int, with_documents: bool, with_state: bool
) -> None:
    compare(length, chunk, segment, with_documents, with_state)


@pytest.mark.slow
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("chunk", [1, 16, 64, 100])
@pytest.mark.parametrize("length", [*range(1, 18), 63, 64, 65, 127, 128, 129, 1000, 1024, 1025, 2048, 4095, 4096])
def test_chunks_compute_the_recurrence_at_all_lengths(length: int, chunk: int, with_documents: bool) -> None:
    compare(length, chunk, 16, with_documents, with_state=True)


@pytest.mark.parametrize("cut", [1, 13, 64, 69])
@pytest.mark.parametrize("with_documents", [False, True])
def test_parts_compose_to_the_whole(cut: int, with_documents: bool) -> None:
    """A part maps the state X before it to A X + S; whether its first token continues X's document is an input."""
    q, k, v, decay, strength, before = inputs_of(70)
    runs = documents(70, share=0.03) if with_documents else None
    t = k, v, -F.softplus(decay), strength.sigmoid()
    _, whole = recurrence(q, *t, runs, before)
    state = before
    for start, stop in ((0, cut), (cut, 70)):
        part = None if runs is None else runs[:, start:stop]
        continued = None if runs is None or start == 0 else runs[:, start] == runs[:, start - 1]
        matrix, after = transition(gated_delta_rule, *(x[:, start:stop] for x in t), part, continued)
        state = matrix @ state + after
    torch.testing.assert_close(state, whole, rtol=1e-11, atol=1e-12)


def test_a_document_leaves_no_bit_in_others() -> None:
    """Neither in their outputs nor in their gradients, within a chunk and over chunks."""
    runs = torch.bucketize(torch.arange(60), torch.tensor([5, 37, 50]), right=True).expand(1, -1)
    one, found = runs[0] == 1, []
    for changed in (False, True):
        t = inputs_of(60, batch=1)
        with torch.no_grad():
            for x in t[:5] if changed else ():
                x[:, ~one] = x[:, ~one].flip(1) * 1.7
        y, _, *gradients = outcome(gated_delta_rule, t, runs, with_state=True, chunk=16, segment=2)
        found.append([each[:, one] for each in (y, *gradients[:5])])
    for kept, again in zip(*found):
        assert torch.equal(kept, again)
        assert kept.count_nonzero() > 0


@pytest.mark.parametrize(("dtype", "output", "gradient"), [(torch.float32, 1e-6, 2e-6), (torch.bfloat16, 3e-3, 6e-3)])
def test_rounding(dtype: torch.dtype, output: float, gradient: float) -> None:
    """Relative errors against fp64 with the same rounded inputs: in bf16 about that of storing the result."""
    rounded = [t.detach().to(dtype) for t in inputs_of(1100, keys=1, d=32, v=32)]
    exact = [t.double().requires_grad_() for t in rounded]
    right = outcome(gated_delta_rule, exact, None, with_state=True)
    found = outcome(gated_delta_rule, [t.requires_grad_() for t in rounded], None, with_state=True)
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, right)]
    assert found[0].dtype == dtype
    assert found[1].dtype == torch.float32
    assert max(errors[:2]) < output, errors
    assert max(errors[2:]) < gradient, errors


class Fla:
    """``fla.ops.gated_delta_rule``: half precision only, queries of value heads that share a key repeated or not."""

    def __init__(self, wrong: bool = False) -> None:
        self.calls, self.wrong = 0, wrong

    def chunk_gated_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        assert q.dtype == k.dtype == v.dtype != torch.float32
        assert q.shape == k.shape
        assert use_qk_l2norm_in_kernel
        assert cu_seqlens is None
        assert not kwargs
        self.calls += 1
        y, state = gated_delta_rule(q, k, v, g * 2 if self.wrong else g, beta, None, initial_state)
        return y, state if output_final_state else None


@pytest.mark.parametrize("wrong", [False, True])
def test_flash_linear_attention_is_called_as_it_wants_to_be(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    """Its double: on a CPU, in bf16. One that applies a decay twice is found out by the check."""
    fla, candidate = Fla(wrong), GATED_DELTA_RULE.candidates["fla"]
    install(monkeypatch, "fla.ops.gated_delta_rule", chunk_gated_delta_rule=fla.chunk_gated_delta_rule)
    found = check_kernel(GATED_DELTA_RULE, candidate.make(), torch.device("cpu"), torch.bfloat16, candidate.covers)
    assert fla.calls > 0
    assert (found or "").startswith("differs from torch") == wrong, found
    assert candidate.missing(torch.device("cpu"), torch.bfloat16) is not None
