"""Recurrences along a sequence whose tokens are distributed over ranks: what linear-time mixers have in common.

Such a mixer carries a state from token to token by a map that is linear in it, ``S_t = T_t S_{t-1} + U_t``, and reads
its output from the state. Maps compose, so that consecutive tokens together are one map, too: a context-parallel rank
computes its chunks from a zero state, the ranks exchange the maps of their chunks, ``(T, S)``, and each adds what the
state before a chunk contributes. A state is small; no rank has the tokens of another one, except for the few rows
before a chunk that the causal convolution reaches back to.

A mixer whose work grows with the square of a chunk asks for shorter ones (:meth:`RecurrentRows.split`). They compose
in the same way, first those of this rank.

Documents are runs of tokens: neither a state nor the convolution reaches from one into the next. In generation the
state after the tokens so far and the last rows are kept, of constant size.

Shapes: S rows of this rank, K chunks of L consecutive rows (two with a ring of context-parallel ranks, else one), B
batch, ``N = K B`` chunks of all samples, W - 1 rows that the convolution reaches back, C channels. After
:meth:`RecurrentRows.split`, K and N count the shorter chunks, and L are their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm

import torch
from torch import Tensor, nn

from megatron.distributed.context_parallel import ContextParallel
from megatron.kernels.state_space import segment_sums
from megatron.layers.context import BuildContext, ForwardContext
from megatron.layers.kv_cache import KVCache

CausalConv = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""``(x_NTC, weight_CW, bias_C, runs_NT) -> y_NLC``: a convolution of L rows, given the W - 1 rows before them, too."""


class Recurrence:
    """The place of a mixer's recurrences in the layout and in the cache of generation."""

    def __init__(self, context: BuildContext, width: int) -> None:
        """Create it.

        Args:
            context: of the mixer.
            width: W of its convolution; 1 without one.
        """
        self.name, self.cp, self.before = context.prefix, context.cp, width - 1

    def rows(self, ctx: ForwardContext) -> RecurrentRows:
        """Return the rows of a forward pass."""
        batch = ctx.batch
        cp = self.cp if batch.seq_length is not None else None
        chunks, length = (0,) if cp is None else cp.chunks, batch.length
        documents_BT = batch.documents if ctx.cache is None else ctx.cache.documents(batch.tokens)
        size = length // (2 * cp.ring.size) if cp is not None and cp.ring.size > 1 else length
        runs_NT = seen_NL = None
        if documents_BT is not None:
            changes_BT = torch.zeros_like(documents_BT)
            changes_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
            back = max(self.before, 1)
            runs_BT = torch.nn.functional.pad(changes_BT.cumsum(1), (back, 0), value=-1)
            skipped = 0 if ctx.cache is None else ctx.cache.length
            starts = [skipped + chunk * size for chunk in chunks]
            runs_NT = torch.cat([runs_BT[:, start : start + back + size] for start in starts])
            seen_NL = runs_NT[:, back:] == runs_NT[:, back - 1 : back]
            runs_NT = runs_NT[:, back - self.before :]
        return RecurrentRows(self.name, cp, len(chunks), self.before, runs_NT, seen_NL, ctx.cache, size)


@dataclass(frozen=True)
class RecurrentRows:
    """The rows of a rank in a forward pass, folded into chunks of consecutive tokens."""

    # Of the mixer.
    name: str
    # None if this rank has the whole sequence.
    cp: ContextParallel | None
    # K, or its number before :meth:`split`
    count: int
    # W - 1
    before: int
    # Number of the document of each row, and of the W - 1 rows before each chunk, int64 ``[N, W - 1 + L]``, not
    # decreasing; -1 before the sequence. None if every sample is one document.
    runs: Tensor | None
    # True for the tokens that continue the document of the row before their chunk, ``[N, L]``; None for all.
    seen: Tensor | None
    cache: KVCache | None
    # L
    length: int
    # Shorter chunks in each, and the rows of these.
    parts: int = 1

    @property
    def own_runs(self) -> Tensor | None:
        """Number of the document of each row, int64 ``[N, L]``; None if every sample is one document."""
        return None if self.runs is None else self.runs[:, self.before :]

    @property
    def passes_states(self) -> bool:
        """True if a state before the first token of a chunk may differ from zero: :meth:`state_before` is needed."""
        return self.cache is not None or self.count * self.parts > 1

    def split(self, size: int) -> RecurrentRows:
        """Return the same rows in chunks of at most ``size`` tokens.

        If these are not as long together, :meth:`fold` appends rows of zeros, which must leave a state as it is.
        """
        parts = -(-self.length // size)
        size = -(-self.length // parts)
        runs_NL = seen_NL = None
        if self.runs is not None and self.seen is not None:
            runs = self.runs[:, self.before :]
            runs = torch.cat((runs, runs[:, -1:].expand(-1, parts * size - self.length)), 1).unflatten(1, (parts, size))
            first = runs[:, :1, 0] - (~self.seen[:, :1]).long()
            before = torch.cat((first, runs[:, :-1, -1]), 1)
            by_part = (self.count, -1, parts)
            runs_NL = runs.unflatten(0, by_part[:2]).transpose(1, 2).flatten(0, 2)
            seen_NL = runs_NL == before.unflatten(0, by_part[:2]).transpose(1, 2).flatten().unsqueeze(1)
        return replace(self, before=0, runs=runs_NL, seen=seen_NL, parts=parts)

    def fold(self, x_SB: Tensor) -> Tensor:
        """Return ``[S, B, ...]`` as ``[N, L, ...]``."""
        x = x_SB.unflatten(0, (self.count, -1))
        if missing := -self.length % self.parts:
            x = torch.cat((x, x.new_zeros(x.shape[0], missing, *x.shape[2:])), 1)
        return x.unflatten(1, (self.parts, -1)).transpose(2, 3).flatten(0, 2)

    def unfold(self, y_NL: Tensor) -> Tensor:
        """Return ``[N, L, ...]`` as ``[S, B, ...]``."""
        y = y_NL.unflatten(0, (self.count, self.parts, -1)).transpose(2, 3).flatten(1, 2)
        return y[:, : self.length].flatten(0, 1)

    def decays(self, log_NLH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the products of decays between the tokens of a chunk, and those since the chunk before.

        Args:
            log_NLH: logarithm of each token's decay, for each head.

        Returns:
            ``[N, H, L, L]``, from the second L to the first, zero for later tokens and other documents; and
            ``[N, H, L]``, zero for documents that begin in the chunk.
        """
        log_NHL, length = log_NLH.transpose(1, 2), log_NLH.shape[1]
        ones = torch.ones(length, length, dtype=torch.bool, device=log_NLH.device)
        between, visible = segment_sums(log_NHL).exp(), ones.tril()
        if self.own_runs is not None:
            visible = visible & (self.own_runs.unsqueeze(2) == self.own_runs.unsqueeze(1)).unsqueeze(1)
        since = log_NHL.cumsum(2).exp()
        if self.seen is not None:
            since = since * self.seen.unsqueeze(1)
        return between * visible, since

    def convolve(self, x_NLC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, kernel: CausalConv) -> Tensor:
        """Return a causal convolution of each document, ``[N, L, C]``."""
        x_NTC = torch.cat((self._rows_before(x_NLC), x_NLC), 1)
        if self.cache is not None:
            self.cache.states[f"{self.name}.rows"] = x_NTC[:, x_NTC.shape[1] - self.before :].clone()
        return kernel(x_NTC, weight_CW, bias_C, self.runs)

    def _rows_before(self, x_NLC: Tensor) -> Tensor:
        """Return the W - 1 rows before each chunk; zeros before the sequence."""
        none_N = x_NLC.new_zeros(x_NLC.shape[0], self.before, x_NLC.shape[2])
        if self.cache is not None:
            return self.cache.states.get(f"{self.name}.rows", none_N)
        if self.count == 1 or self.cp is None or self.before == 0:
            return none_N
        last_KBtC = x_NLC[:, -self.before :].unflatten(0, (self.count, -1))
        of_all = self.cp.gather_chunks(last_KBtC)  # the last rows of every chunk; all of it, if it is shorter
        rows_BTC = torch.cat((none_N[: of_all.shape[1]], of_all.transpose(0, 1).flatten(1, 2)), 1)
        starts = [chunk * of_all.shape[2] for chunk in self.cp.chunks]
        return torch.cat([rows_BTC[:, start : start + self.before] for start in starts])

    def state_before(self, transition: Tensor, state: Tensor) -> Tensor:
        """Return the state before each chunk; in generation keep the state after the tokens.

        Args:
            transition: what a chunk does to the state before it, zero where a document begins in it: a matrix that
                multiplies from the left, ``[N, ..., D, D]``, or a factor for each matrix, ``[N, ...]``.
            state: after each chunk, if the state before it is zero, ``[N, ..., D, E]``.
        """
        transitions, states = (t.unflatten(0, (self.count, self.parts, -1)).unbind(1) for t in (transition, state))
        before = [self._state_before(transitions, states)]
        for of_part, added in zip(transitions[:-1], states):
            before.append(_apply(of_part, before[-1]) + added)
        if self.cache is not None:
            self.cache.states[self.name] = (_apply(transitions[-1], before[-1]) + states[-1]).flatten(0, 1)
        return torch.stack(before, 1).flatten(0, 2)

    def _state_before(self, transitions: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
        """Return the state before the first of the parts of each chunk, ``[K, B, ...]``."""
        if self.cache is not None and self.name in self.cache.states:
            return self.cache.states[self.name].unsqueeze(0)
        if self.count == 1 or self.cp is None:
            return torch.zeros_like(states[0])
        (transition, *transitions), (state, *states) = transitions, states
        for of_part, added in zip(transitions, states):
            state = _apply(of_part, state) + added
            transition = of_part @ transition if transition.ndim == state.ndim else of_part * transition
        both = torch.cat((transition.flatten(2), state.flatten(2)), 2)
        sizes, current, before = [transition[0, 0].numel(), state[0, 0].numel()], torch.zeros_like(state[0]), []
        for of_chunk in self.cp.gather_chunks(both):
            before.append(current)
            t, s = of_chunk.split(sizes, 1)
            current = _apply(t.unflatten(1, transition.shape[2:]), current) + s.unflatten(1, state.shape[2:])
        return torch.stack([before[chunk] for chunk in self.cp.chunks])

    def carry(
        self,
        scan: Callable[[Tensor | None], tuple[Tensor, Tensor]],
        of_chunks: Callable[[], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Return the outputs of a scan that begins in each chunk with the state before it; in generation keep the last.

        Args:
            scan: maps the states before the chunks, None for zeros, to outputs and the states after the chunks.
            of_chunks: returns the arguments of :meth:`state_before`; called if context-parallel ranks pass states.
        """
        if not self.passes_states:
            return scan(None)[0]
        before = self.state_before(*of_chunks()) if self.cache is None else self.cache.states.get(self.name)
        if before is not None and self.seen is not None:  # zero where a document begins with the chunk
            before = before * self.seen[:, 0].view(-1, *(1,) * (before.ndim - 1))
        y, after = scan(before)
        if self.cache is not None:
            self.cache.states[self.name] = after
        return y

    def gather_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Exchange heads for rows where ranks share the chunks of a ring: ``[S, B, heads, D]`` of each tensor.

        Heads of a tensor that are too few are repeated, so that each rank has those that its part of the others need.
        """
        if (size := self.head_ranks) == 1 or self.cp is None:
            return list(tensors)
        copies = [lcm(t.shape[2], size) // t.shape[2] for t in tensors]
        return self.cp.gather_rows([t.repeat_interleave(n, 2) if n > 1 else t for t, n in zip(tensors, copies)])

    def own_heads(self, parameter: Tensor) -> Tensor:
        """Return the rows of a parameter ``[heads, ...]`` that belong to this rank after :meth:`gather_rows`."""
        if (size := self.head_ranks) == 1 or self.cp is None:
            return parameter
        copies = lcm(len(parameter), size) // len(parameter)
        return parameter.repeat_interleave(copies, 0).chunk(size)[self.cp.heads.rank]

    def scatter_rows(self, y_TBND: Tensor) -> Tensor:
        """Exchange rows for heads, the inverse of :meth:`gather_rows`."""
        return y_TBND if self.head_ranks == 1 or self.cp is None else self.cp.scatter_rows(y_TBND)

    @property
    def head_ranks(self) -> int:
        """Number of ranks that share the chunks of a ring rank, and exchange rows for heads."""
        return 1 if self.cp is None else self.cp.heads.size


class ChannelConvolution(nn.Module):
    """Causal convolution of every channel of some parts of a fused projection, each of which has heads.

    Args:
        context: of the module.
        shapes: heads of each part on this tensor-parallel rank, and their channels.
    """

    def __init__(self, context: BuildContext, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.weight, self.bias = context.parameter("weight", autograd=True), context.bias(autograd=True)
        self.kernel: CausalConv = context.kernels.causal_conv
        self.shapes = shapes

    def exchange_heads(self, rows: RecurrentRows, x_SBC: Tensor, *of_heads_SBN: Tensor) -> list[Tensor]:
        """Exchange heads for rows (:meth:`RecurrentRows.gather_rows`), also of values that each head has one of."""
        if rows.head_ranks == 1:
            return [x_SBC, *of_heads_SBN]
        found = rows.gather_rows([*self._parts(x_SBC, 2), *(t.unsqueeze(3) for t in of_heads_SBN)])
        parts, others = found[: len(self.shapes)], found[len(self.shapes) :]
        # Copies, which do not keep what was received with them.
        return [torch.cat([part.flatten(2) for part in parts], 2), *(t.flatten(2).clone() for t in others)]

    def forward(self, rows: RecurrentRows, x_SBC: Tensor) -> list[Tensor]:
        """Return the parts ``[N, L, heads, channels]`` of the heads that this rank has after the exchange."""
        weight_CW, bias_C = self._own(self.weight, rows), None if self.bias is None else self._own(self.bias, rows)
        y_NLC = rows.convolve(rows.fold(x_SBC), weight_CW, bias_C, self.kernel)
        size = rows.head_ranks
        shapes = [(lcm(heads, size) // size, channels) for heads, channels in self.shapes]
        parts = y_NLC.split([heads * channels for heads, channels in shapes], 2)
        return [part.unflatten(2, shape) for part, shape in zip(parts, shapes)]

    def _own(self, parameter_C: Tensor, rows: RecurrentRows) -> Tensor:
        """Return what belongs to this rank after the exchange of heads."""
        if rows.head_ranks == 1:
            return parameter_C
        return torch.cat([rows.own_heads(part).flatten(0, 1) for part in self._parts(parameter_C, 0)])

    def _parts(self, x_C: Tensor, dim: int) -> list[Tensor]:
        parts = x_C.split([heads * channels for heads, channels in self.shapes], dim)
        return [part.unflatten(dim, shape) for part, shape in zip(parts, self.shapes)]


def _apply(transition: Tensor, state: Tensor) -> Tensor:
    return transition @ state if transition.ndim == state.ndim else transition[..., None, None] * state
