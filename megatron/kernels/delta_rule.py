"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464), a linear recurrence with a matrix as state.

Per value head, with a decay ``a_t`` in (0, 1] and a writing strength ``b_t`` in [0, 1]::

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T        y_t = S_t^T q_t

Keys and queries are divided by their L2 norm, queries by the square root of their channels, too. The rule replaces the
value that the state holds for a key by a new one, in part::

    S_t = a_t S_{t-1} + k_t u_t^T                            u_t = b_t (v_t - a_t S_{t-1}^T k_t)

Within a chunk of C tokens the ``u_t`` solve a triangular system (the WY form of arXiv 2406.06484, with decays). Its
solution is linear in the state before the chunk, so that all chunks are solved at once, and one after the other only
applies the state and changes it.

Shapes: B batch, L tokens, K heads of queries and keys, N = K R heads of values, of which R consecutive ones share a
key, D channels of a key, V of a value; M chunks of C tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from megatron.config.gated_delta_net import CHUNK, SEGMENT
from megatron.kernels.operation import HALF_DTYPES, Candidate, KernelCheck, Operation, missing_modules
from megatron.kernels.state_space import segment_sums

NORM_EPS = 1e-6
"""Added to the sum of squares of a query or key."""

GatedDeltaRuleKernel = Callable[..., tuple[Tensor, Tensor]]
"""``rule(q_BLKD, k_BLKD, v_BLNV, log_decay_BLN, beta_BLN, runs_BL, state_BNDV) -> (y_BLNV, state_BNDV)``, see
:func:`gated_delta_rule`. Keeps nothing but its inputs for backward."""


def gated_delta_rule(
    q_BLKD: Tensor | None,
    k_BLKD: Tensor,
    v_BLNV: Tensor,
    log_decay_BLN: Tensor,
    beta_BLN: Tensor,
    runs_BL: Tensor | None = None,
    state_BNDV: Tensor | None = None,
    chunk: int = CHUNK,
    segment: int = SEGMENT,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule in chunks; decays and states in at least fp32.

    Backward computes everything again from the inputs, one segment of chunks after the other.

    Args:
        q_BLKD: queries; None if the outputs are not needed, which are empty then.
        k_BLKD: keys.
        v_BLNV: values.
        log_decay_BLN: logarithm of the decays, at most 0.
        beta_BLN: writing strengths.
        runs_BL: the number of each token's document, not decreasing: the state is zero before the first token of a
            document. None if all are of one.
        state_BNDV: the state before the tokens, which belongs to the document of the first one; None if it is zero. It
            may have further columns, for which the values are zero.
        chunk: tokens of a chunk.
        segment: chunks of a segment.

    Returns:
        The outputs, in the dtype of the values, and the state after the tokens, in that of computation.
    """
    y: Tensor
    state: Tensor
    inputs = q_BLKD, k_BLKD, v_BLNV, log_decay_BLN, beta_BLN, state_BNDV, runs_BL
    y, state = _GatedDeltaRule.apply(*inputs, min(chunk, k_BLKD.shape[1]), segment)
    return y, state


class _GatedDeltaRule(torch.autograd.Function):
    """The rule by segments, of which backward keeps the inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        state: Tensor | None,
        runs: Tensor | None,
        chunk: int,
        segment: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, log_decay, beta, state, runs)
        ctx.chunk, ctx.segment = chunk, segment
        ctx.set_materialize_grads(False)
        inputs, outputs = _Inputs(q, k, v, log_decay, beta, runs), []
        for part in inputs.segments(chunk * segment):
            y, after = _segment(part, state, chunk)
            outputs.append(y)
            state = after
        return torch.cat(outputs, 1), after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, beta, state, runs = ctx.saved_tensors
        segments = _Inputs(q, k, v, log_decay, beta, runs).segments(ctx.chunk * ctx.segment)
        states = [state]
        for part in segments[:-1]:
            states.append(_segment(part._replace(q=None), states[-1], ctx.chunk)[1])
        grads = [torch.empty_like(t) if t is not None and t.requires_grad else None for t in (q, k, v, log_decay, beta)]
        end = k.shape[1]
        for part, before in zip(reversed(segments), reversed(states)):
            start = end - part.k.shape[1]
            leaves: list[Any] = [None if t is None else t.detach().requires_grad_() for t in (*part[:5], before)]
            with torch.enable_grad():
                y, after = _segment(_Inputs._make((*leaves[:5], part.runs, part.before)), leaves[5], ctx.chunk)
            seeds = {y: None if dy is None else dy[:, start:end], after: dstate}
            given = {out: seed for out, seed in seeds.items() if seed is not None}
            wanted = [t for t in leaves if t is not None]
            found = iter(torch.autograd.grad(list(given), wanted, list(given.values()), allow_unused=True))
            of_leaves = [None if t is None else next(found, None) for t in leaves]
            for grad, part_grad in zip(grads, of_leaves):
                if grad is not None:
                    grad[:, start:end] = 0 if part_grad is None else part_grad
            dstate, end = of_leaves[5], start
        return *grads, None if state is None or not state.requires_grad else dstate, None, None, None


class _Inputs(NamedTuple):
    """Inputs of the tokens of a segment."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    runs: Tensor | None
    # The document of the token before them, ``[B, 1]``; None if that of the first token.
    before: Tensor | None = None

    def segments(self, size: int) -> list[_Inputs]:
        """Cut along the sequence into parts of ``size`` tokens."""
        cut = []
        for start in range(0, self.k.shape[1], size):
            part: list[Any] = [None if t is None else t[:, start : start + size] for t in self[:6]]
            part.append(self.runs[:, start - 1 : start] if self.runs is not None and start else None)
            cut.append(_Inputs._make(part))
        return cut


def _segment(inputs: _Inputs, state_BNDV: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the outputs of a segment and the state after it."""
    values, keys = inputs.v.shape[2], inputs.k.shape[2]
    wide = torch.promote_types(inputs.v.dtype, torch.float32)
    padding, length = -inputs.k.shape[1] % chunk, inputs.k.shape[1]

    def chunks(x: Tensor, heads: int) -> Tensor:
        """Return ``[B, L, heads, ...]`` as ``[B, K, heads / K, M, C, ...]``; added tokens are zero."""
        x = F.pad(x.to(wide), (0, 0) * (x.ndim - 2) + (0, padding))
        x = x.unflatten(1, (-1, chunk)).unflatten(3, (keys, heads // keys))
        return x.permute(0, 3, 4, 1, 2, *range(5, x.ndim))

    columns = inputs.v.shape[3] if state_BNDV is None else state_BNDV.shape[3]
    v = chunks(F.pad(inputs.v, (0, columns - inputs.v.shape[3])), values)
    k, beta = chunks(l2_normalized(inputs.k.to(wide)), keys), chunks(inputs.beta, values)
    log = chunks(inputs.log_decay, values)
    hidden, since = torch.ones(chunk, chunk, dtype=torch.bool, device=k.device).triu(1), log.cumsum(-1).exp()
    if inputs.runs is not None:
        runs_BMC = F.pad(inputs.runs, (0, padding), mode="replicate").unflatten(1, (-1, chunk))
        first_B1 = runs_BMC[:, 0, :1] if inputs.before is None else inputs.before
        before_BM1 = torch.cat((first_B1, runs_BMC[:, :-1, -1]), 1).unsqueeze(2)
        since = since.masked_fill((runs_BMC != before_BM1)[:, None, None], 0)  # factor of the state before the chunk
        hidden = (hidden | (runs_BMC.unsqueeze(3) != runs_BMC.unsqueeze(2)))[:, None, None]
    decays = segment_sums(log).masked_fill(hidden, -torch.inf).exp()

    # (I + lower triangle) u = beta (v - since k S): u is ``new - read S``, for any state S before the chunk.
    coupled = (k @ k.mT) * decays * beta.unsqueeze(-1)
    right = torch.cat((v * beta.unsqueeze(-1), k * (beta * since).unsqueeze(-1)), -1)
    solved = torch.linalg.solve_triangular(coupled, right, upper=False, unitriangular=True)
    new, read = solved.split((v.shape[-1], k.shape[-1]), -1)
    written, kept = k * decays[..., -1, :].unsqueeze(-1), since[..., -1, None, None]

    shape = (*v.shape[:3], k.shape[-1], v.shape[-1])
    state = v.new_zeros(shape) if state_BNDV is None else state_BNDV.to(wide).view(shape)
    states, updates = [], []
    for m in range(v.shape[3]):
        states.append(state)
        updates.append(new[:, :, :, m] - read[:, :, :, m] @ state)
        state = kept[:, :, :, m] * state + written[:, :, :, m].mT @ updates[-1]
    after = state.flatten(1, 2)
    if inputs.q is None:
        return inputs.v.new_empty(len(inputs.v), 0, *inputs.v.shape[2:]), after
    q = chunks(l2_normalized(inputs.q.to(wide)) * inputs.q.shape[-1] ** -0.5, keys)
    y = (q * since.unsqueeze(-1)) @ torch.stack(states, 3) + ((q @ k.mT) * decays) @ torch.stack(updates, 3)
    y = y.permute(0, 3, 4, 1, 2, 5).flatten(3, 4).flatten(1, 2)
    return y[:, :length].to(inputs.v.dtype), after


def l2_normalized(x: Tensor) -> Tensor:
    """Divide by the L2 norm over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def transition(
    rule: GatedDeltaRuleKernel,
    k_BLKD: Tensor,
    v_BLNV: Tensor,
    log_decay_BLN: Tensor,
    beta_BLN: Tensor,
    runs_BL: Tensor | None = None,
    continued_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``(A_BNDD, S_BNDV)``: tokens map the state X before them to ``A X + S``.

    As the state of a value channel does not depend on the others, one pass computes both: with values ``[v, 0]`` and
    the state ``[0, I]`` before.

    Args:
        rule: kernel.
        k_BLKD: see :func:`gated_delta_rule`, as the others.
        v_BLNV: values.
        log_decay_BLN: logarithm of the decays.
        beta_BLN: writing strengths.
        runs_BL: documents.
        continued_B: whether the first token continues the document that X belongs to; None for all.
    """
    heads, channels, width = v_BLNV.shape[2], k_BLKD.shape[3], v_BLNV.shape[3]
    wide = torch.promote_types(v_BLNV.dtype, torch.float32)
    before = F.pad(torch.eye(channels, dtype=wide, device=v_BLNV.device), (width, 0))
    before_BNDE = before.expand(len(v_BLNV), heads, -1, -1)
    if continued_B is not None:
        before_BNDE = before_BNDE * continued_B[:, None, None, None]
    _, after_BNDE = rule(None, k_BLKD, v_BLNV, log_decay_BLN, beta_BLN, runs_BL, before_BNDE)
    state, matrix = after_BNDE.split((width, channels), -1)
    return matrix, state


def _fla() -> GatedDeltaRuleKernel:
    """Load flash-linear-attention's kernels, which keep more than their inputs: forward is computed again."""
    fused: Any = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    def rule(
        q: Tensor | None, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, runs: Tensor | None, state: Any
    ) -> tuple[Tensor, Tensor]:
        copies = v.shape[2] // k.shape[2]

        def call(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
            q, k = (t.repeat_interleave(copies, 2) if copies > 1 else t for t in (q, k))
            v = v if state is None else F.pad(v, (0, state.shape[3] - v.shape[3]))
            options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
            found: tuple[Tensor, Tensor] = fused(q, k, v, *others, **options)
            return found

        inputs = k if q is None else q, k, v, log_decay, beta
        found: tuple[Tensor, Tensor] = checkpoint(call, *inputs, use_reentrant=False, preserve_rng_state=False)
        return found

    return rule


def _fla_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda" or dtype not in HALF_DTYPES:
        return "flash-linear-attention needs bf16 or fp16 on a GPU"
    return missing_modules("fla")


def _fla_covers(q: Tensor | None, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, *others: Any) -> bool:
    """Return True for sequences of one document, of more than a token."""
    runs, state = others
    columns = v.shape[3] if state is None else state.shape[3]
    return runs is None and k.shape[1] > 1 and k.shape[3] <= 256 and columns <= 256


def _checks() -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def run(rule: GatedDeltaRuleKernel, t: Sequence[Tensor]) -> Sequence[Tensor]:
        q, k, v, decay, beta, state, *runs = t
        wide = torch.promote_types(v.dtype, torch.float32)
        inputs = -F.softplus(decay.to(wide)), beta.to(wide).sigmoid(), runs[0] if runs else None
        return rule(q, k, v, *inputs, state.to(wide))

    # Lengths that chunks do not divide, and more than a segment of them; heads of values that share a key.
    length = CHUNK * SEGMENT + 37
    tokens = randn(2, length, 1, 64), randn(2, length, 1, 64), randn(2, length, 2, 64), *randn(2, 2, length, 2)
    state, runs = randn(2, 2, 64, 64), (torch.rand(2, length, generator=generator) < 0.01).cumsum(1)
    one = [t[:, :1] for t in tokens]
    return [KernelCheck(run, inputs) for inputs in ((*tokens, state), (*tokens, state, runs), (*one, state))]


GATED_DELTA_RULE = Operation(
    {
        "fla": Candidate(_fla, _fla_missing, deterministic=False, covers=_fla_covers),
        "torch": Candidate(lambda: gated_delta_rule),
    },
    _checks,
)
