"""The scan of Mamba-2: a state per head that decays by a scalar (SSD, arXiv 2405.21060).

Of each head ``state_t = exp(dt_t a) state_(t-1) + dt_t x_t b_t^T`` and ``y_t = state_t c_t``. In chunks of Q tokens
this is a few matrix products (section 6 there): within a chunk, tokens see each other by the scores ``c_t . b_s`` times
the decay between them; a state is computed once per chunk.

Products and sums are in at least fp32. Of 1,024 tokens in bf16, outputs and the gradients of x, b and c differ from
those of the recurrence in fp64 by 1.7e-3 of their norm, the rounding of the results; the last state differs by 7e-8,
and the gradients of dt and a by 3e-7.

Shapes: B sequences, L tokens, N heads, P channels of a head, G groups of R heads with common b and c, D channels of a
state, K chunks, Q tokens of a chunk (S as its earlier tokens), J chunks and the state before them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.config.mamba import SEGMENT_CHUNKS
from megatron.kernels.operation import Candidate, KernelCheck, Operation, half_on_gpu, missing_modules

StateSpaceKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, int], tuple[Tensor, Tensor]]
"""``state_space(x_BLNP, dt_BLN, a_N, b_BLGD, c_BLGD, runs_BL, chunk) -> (y_BLNP, state_BNPD)``."""


def state_space(
    x_BLNP: Tensor,
    dt_BLN: Tensor,
    a_N: Tensor,
    b_BLGD: Tensor,
    c_BLGD: Tensor,
    runs_BL: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Scan from a state of zeros. Only the inputs are kept for backward.

    Args:
        x_BLNP: inputs of the heads.
        dt_BLN: step sizes, not negative, in at least fp32: the type of decays and states.
        a_N: negative, in the same type; a decay is ``exp(dt a)``.
        b_BLGD: what writes to the state; heads of a group are consecutive.
        c_BLGD: what reads from it.
        runs_BL: numbers of the documents, ascending: the state is reset where a number changes. None for one document.
        chunk: tokens of a chunk. The result depends on it by rounding only.

    Returns:
        Outputs in the type of ``x``, and the state after the last token, that of its document, in the type of ``dt``.
    """
    y, state_BGRPD = _StateSpace.apply(x_BLNP, dt_BLN, a_N, b_BLGD, c_BLGD, runs_BL, min(chunk, x_BLNP.shape[1]))
    return y, state_BGRPD.flatten(1, 2)


def decay_of_all(dt_BLN: Tensor, a_N: Tensor, seen_BL: Tensor | None) -> Tensor:
    """Return the factor ``[B, N]`` by which a scan multiplies the state before it; 0 if its document ends.

    Arguments as for :func:`read_state`.
    """
    decay_BN = (dt_BLN * a_N).sum(1).exp()
    return decay_BN if seen_BL is None else decay_BN.masked_fill(~seen_BL[:, -1:], 0.0)


def read_state(state_BNPD: Tensor, dt_BLN: Tensor, a_N: Tensor, c_BLGD: Tensor, seen_BL: Tensor | None) -> Tensor:
    """Return what a state before the first token adds to the outputs of a scan ``[B, L, N, P]``, in its type.

    A scan is linear in that state: its outputs are those of :func:`state_space` and these, its last state is that of
    :func:`state_space` and :func:`decay_of_all` times the one before. Only the inputs are kept for backward.

    Args:
        state_BNPD: the state.
        dt_BLN: of the scan, as its other inputs.
        a_N: likewise.
        c_BLGD: likewise.
        seen_BL: True for the first tokens, of the document of the state; None if they all are.
    """
    y: Tensor = _ReadState.apply(state_BNPD, dt_BLN, a_N, c_BLGD, seen_BL)
    return y


class _ReadState(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.save_for_backward(*inputs)
        return _read(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, seen = ctx.saved_tensors
        state, dt, a, c = leaves = [t.detach().requires_grad_() for t in inputs]
        with torch.enable_grad():
            y = _read(state, dt, a, c, seen)
        return *torch.autograd.grad(y, leaves, dy), None


def _read(state_BNPD: Tensor, dt_BLN: Tensor, a_N: Tensor, c_BLGD: Tensor, seen_BL: Tensor | None) -> Tensor:
    log_BLN = (dt_BLN * a_N).cumsum(1)
    if seen_BL is not None:
        log_BLN = log_BLN.masked_fill(~seen_BL.unsqueeze(2), -torch.inf)
    groups = c_BLGD.shape[2]
    state_BGRPD, decay_BLGR = state_BNPD.unflatten(1, (groups, -1)), log_BLN.exp().unflatten(2, (groups, -1))
    y_BLGRP = torch.einsum("blgd,bgrpd->blgrp", c_BLGD.to(state_BNPD), state_BGRPD) * decay_BLGR.unsqueeze(4)
    return y_BLGRP.flatten(2, 3)


class _Part(NamedTuple):
    """Inputs of a scan, or of some of its tokens."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    runs: Tensor | None

    def tokens(self, start: int, stop: int) -> _Part:
        """Return those of some tokens."""
        x, dt, b, c = (t[:, start:stop] for t in (self.x, self.dt, self.b, self.c))
        return _Part(x, dt, self.a, b, c, None if self.runs is None else self.runs[:, start:stop])

    def segments(self, chunk: int) -> Iterator[tuple[slice, _Part, Tensor | None]]:
        """Yield the tokens that are computed at a time, their inputs, and the document of the token before them."""
        length, size = self.x.shape[1], chunk * SEGMENT_CHUNKS
        for start in range(0, length, size):
            before = None if self.runs is None else self.runs[:, max(0, start - 1)]
            yield slice(start, start + size), self.tokens(start, start + size), before

    def padded(self, chunk: int) -> _Part:
        """Fill up the last chunk with tokens that neither write to the state nor let it decay."""
        missing = -self.x.shape[1] % chunk
        if not missing:
            return self
        x, dt, b, c = (F.pad(t, (0, 0) * (t.dim() - 2) + (0, missing)) for t in (self.x, self.dt, self.b, self.c))
        runs = self.runs
        return _Part(
            x, dt, self.a, b, c, None if runs is None else torch.cat((runs, runs[:, -1:].expand(-1, missing)), 1)
        )


class _StateSpace(torch.autograd.Function):
    """The scan, segment by segment; backward computes each again, the last one first."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, chunk = inputs
        ctx.save_for_backward(*tensors)
        ctx.chunk = chunk
        whole = _Part(*tensors)
        y, state = torch.empty_like(whole.x), _zero_state(whole)
        for tokens, part, before in whole.segments(chunk):
            y[:, tokens], state = _scan(part, state, before, chunk)
        return y, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        chunk, whole = ctx.chunk, _Part(*ctx.saved_tensors)
        segments, states = list(whole.segments(chunk)), [_zero_state(whole)]
        for _, part, before in segments[:-1]:
            states.append(_states(part, states[-1], before, chunk)[:, -1])
        da, rest = torch.zeros_like(whole.a), tuple(torch.empty_like(t) for t in (whole.x, whole.dt, whole.b, whole.c))
        for tokens, part, before in reversed(segments):
            leaves = [t.detach().requires_grad_() for t in (part.x, part.dt, part.b, part.c, part.a, states.pop())]
            x, dt, b, c, a, state = leaves
            with torch.enable_grad():
                outputs = _scan(_Part(x, dt, a, b, c, part.runs), state, before, chunk)
            *grads, more, dstate = torch.autograd.grad(outputs, leaves, (dy[:, tokens], dstate))
            da += more
            for whole_grad, grad in zip(rest, grads):
                whole_grad[:, tokens] = grad
        dx, ddt, db, dc = rest
        return dx, ddt, da, db, dc, None, None


def _zero_state(part: _Part) -> Tensor:
    """Return the state before the first token ``[B, G, R, P, D]``."""
    (batch, _, heads, channels), (*_, groups, state) = part.x.shape, part.b.shape
    return part.dt.new_zeros(batch, groups, heads // groups, channels, state)


def _scan(part: _Part, state: Tensor, before_B: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the outputs, and the state after the last token, given that before the first and its document."""
    length, part = part.x.shape[1], part.padded(chunk)
    states_BJGRPD = _states(part, state, before_B, chunk)
    u_BKQGRP, b_BKQGD, c_BKQGD, log_BKGRQ, runs_BKQ = _chunks(part, chunk)
    scores_BKGQS = torch.einsum("bkqgd,bksgd->bkgqs", c_BKQGD, b_BKQGD)
    weights_BKGRQS = scores_BKGQS.unsqueeze(3) * _decays(log_BKGRQ, runs_BKQ)
    y_BKQGRP = torch.einsum("bkgrqs,bksgrp->bkqgrp", weights_BKGRQS, u_BKQGRP)
    since_BKGRQ = log_BKGRQ.cumsum(-1)
    if runs_BKQ is not None and before_B is not None:
        ends_BK = torch.cat((before_B.unsqueeze(1), runs_BKQ[:, :-1, -1]), 1)
        since_BKGRQ = since_BKGRQ.masked_fill((runs_BKQ != ends_BK.unsqueeze(2))[:, :, None, None], -torch.inf)
    y_BKQGRP = y_BKQGRP + torch.einsum("bkqgd,bkgrpd,bkgrq->bkqgrp", c_BKQGD, states_BJGRPD[:, :-1], since_BKGRQ.exp())
    return y_BKQGRP.flatten(3, 4).flatten(1, 2)[:, :length].to(part.x.dtype), states_BJGRPD[:, -1]


def _states(part: _Part, state: Tensor, before_B: Tensor | None, chunk: int) -> Tensor:
    """Return the states before each chunk, and after the last one ``[B, J, G, R, P, D]``."""
    u_BKQGRP, b_BKQGD, _, log_BKGRQ, runs_BKQ = _chunks(part.padded(chunk), chunk)
    left_BKGRQ, ends_BJ = F.pad(log_BKGRQ[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1), None
    if runs_BKQ is not None and before_B is not None:
        ends_BJ = torch.cat((before_B.unsqueeze(1), runs_BKQ[:, :, -1]), 1)
        left_BKGRQ = left_BKGRQ.masked_fill((runs_BKQ != ends_BJ[:, 1:, None])[:, :, None, None], -torch.inf)
    of_chunks = torch.einsum("bkqgrp,bkgrq,bkqgd->bkgrpd", u_BKQGRP, left_BKGRQ.exp(), b_BKQGD)
    decays_BGRJJ = _decays(F.pad(log_BKGRQ.sum(-1).movedim(1, -1), (1, 0)), ends_BJ)
    return torch.einsum("bgrjk,bkgrpd->bjgrpd", decays_BGRJJ, torch.cat((state.unsqueeze(1), of_chunks), 1))


def _chunks(part: _Part, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return inputs by chunks: ``dt x``, ``b``, ``c``, logarithms of the decays, and documents."""
    groups, wide = part.b.shape[2], part.dt.dtype
    heads = part.dt.shape[2] // groups
    u_BLNP = part.x.to(wide) * part.dt.unsqueeze(3)
    u_BKQGRP = u_BLNP.unflatten(2, (groups, heads)).unflatten(1, (-1, chunk))
    b_BKQGD, c_BKQGD = (t.to(wide).unflatten(1, (-1, chunk)) for t in (part.b, part.c))
    log_BKGRQ = (part.dt * part.a).unflatten(1, (-1, chunk)).mT.unflatten(2, (groups, heads))
    runs_BKQ = None if part.runs is None else part.runs.unflatten(1, (-1, chunk))
    return u_BKQGRP, b_BKQGD, c_BKQGD, log_BKGRQ, runs_BKQ


def _decays(log_GRT: Tensor, runs_T: Tensor | None) -> Tensor:
    """Return the decay from token s to token t ``[.., t, s]``; 0 from later ones and other documents."""
    seen_TT = torch.ones(2 * log_GRT.shape[-1:], dtype=torch.bool, device=log_GRT.device).tril()
    if runs_T is not None:
        seen_TT = (seen_TT & (runs_T.unsqueeze(-1) == runs_T.unsqueeze(-2)))[..., None, None, :, :]
    return segment_sums(log_GRT).masked_fill(~seen_TT, -torch.inf).exp()


def segment_sums(log_T: Tensor) -> Tensor:
    """Return the sums over the tokens after s up to t ``[.., t, s]``; 0 for later s (segment sums, as in the paper).

    Differences of cumulative sums would keep the rounding of tokens before s, whose decays may be much smaller, and
    which may belong to other documents.
    """
    after_TT = torch.ones(2 * log_T.shape[-1:], dtype=torch.bool, device=log_T.device).tril(-1)
    return log_T.unsqueeze(-1).where(after_TT, 0.0).cumsum(-2)


def _library_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    return missing_modules("mamba_ssm") if half_on_gpu(device, dtype) else "mamba_ssm needs bf16 or fp16 on a GPU"


def _library() -> StateSpaceKernel:
    """Load the kernel of the package mamba-ssm, which takes documents as int32."""
    module: Any = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")

    def library_scan(
        x_BLNP: Tensor,
        dt_BLN: Tensor,
        a_N: Tensor,
        b_BLGD: Tensor,
        c_BLGD: Tensor,
        runs_BL: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        documents = None if runs_BL is None else runs_BL.to(torch.int32)
        y, state = module.mamba_chunk_scan_combined(
            x_BLNP, dt_BLN, a_N, b_BLGD, c_BLGD, chunk, seq_idx=documents, return_final_states=True
        )
        return y, state.to(dt_BLN.dtype)

    return library_scan


def _library_covers(x_BLNP: Tensor, dt_BLN: Tensor, *rest: Any) -> bool:
    """Its tiles are powers of two, and its programs are those of whole sequences."""
    *_, chunk = rest
    return x_BLNP.shape[1] > 1 and chunk & (chunk - 1) == 0 and dt_BLN.dtype == torch.float32


def _checks() -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)
    x, b, c = (
        torch.randn(2, 203, *shape, generator=generator, dtype=torch.float64) for shape in ((4, 16), (2, 16), (2, 16))
    )
    dt, a = (0.01 + torch.rand(*shape, generator=generator, dtype=torch.float64) for shape in ((2, 203, 4), (4,)))
    runs = (torch.rand(2, 203, generator=generator) < 0.02).long().cumsum(1)

    def scan(f: StateSpaceKernel, t: Sequence[Tensor], runs: Tensor | None) -> Sequence[Tensor]:
        x, dt, a, b, c = t
        wide = torch.promote_types(dt.dtype, torch.float32)
        return f(x, dt.to(wide), -a.to(wide), b, c, runs, 64)

    return [
        KernelCheck(lambda f, t: scan(f, t, None), (x, dt, a, b, c)),
        KernelCheck(lambda f, t: scan(f, t[:5], t[5]), (x, dt, a, b, c, runs)),
    ]


STATE_SPACE = Operation(
    {
        "mamba_ssm": Candidate(_library, _library_missing, deterministic=False, covers=_library_covers),
        "torch": Candidate(lambda: state_space),
    },
    _checks,
)
