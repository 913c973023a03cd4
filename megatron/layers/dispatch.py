"""Token dispatch of a mixture of experts: tokens go to the ranks of their experts, and results come back.

A :class:`Dispatcher` moves tokens between ranks. A token goes once to each rank that holds some of its experts, with
all its choices and their weights. :class:`ExpertRows` expands the tokens of a rank to rows sorted by expert, and adds
the results of a token, so that one row returns to the rank that sent it, which adds the parts of all ranks.

==========  ===================================================================================================
dispatcher  exchange between ranks
==========  ===================================================================================================
local       none: one rank holds all experts.
exact       As many rows as there are. Ranks exchange their numbers first, which the host reads: it waits for the
            device once per layer.
bounded     A block of fixed size for each rank, and a fixed number of rows for the experts, so the host never
            waits. If tokens do not fit, the weights of the choices become NaN, and so does the loss.
==========  ===================================================================================================

Nothing waits for the device but the exact exchange, and all sums are gathers: results are bitwise reproducible.

Shapes: T tokens of this rank, H hidden, K experts per token, P ranks, S rows sent, N tokens that arrive, E experts of
this rank, R rows of experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.config.dispatch import ExchangeBuffers
from megatron.config.model import ModelConfig
from megatron.config.plugins import registered
from megatron.distributed import comm, mappings
from megatron.distributed.comm import Group
from megatron.kernels.rows import TORCH_ROWS, RowKernels, SortedKeys
from megatron.layers.context import BuildContext

# ---- Copies of rows, and their sums


@dataclass(frozen=True)
class RowCopies:
    """Rows that are copies of items."""

    # Item of each row [R]; N for a row of zeros.
    source: Tensor
    # Rows of each item [N, C]; R and above for none.
    places: Tensor
    # Every row has an item, and every place is a row.
    all_copied: bool
    all_placed: bool
    kernels: RowKernels = TORCH_ROWS

    def copy(self, x: Tensor) -> Tensor:
        """Return a copy of its item for every row: ``[N, H] -> [R, H]``. Adjoint of :meth:`add`."""
        rows: Tensor = _LinearMap.apply(x, self.gather, self.sum)
        return rows

    def add(self, y: Tensor) -> Tensor:
        """Return the sum of its rows for every item: ``[R, H] -> [N, H]``. Adjoint of :meth:`copy`."""
        items: Tensor = _LinearMap.apply(y, self.sum, self.gather)
        return items

    def gather(self, x: Tensor) -> Tensor:
        """Return :meth:`copy`, without a gradient."""
        return self.kernels.sum_rows(x, self.source.unsqueeze(1), self.all_copied)

    def sum(self, y: Tensor) -> Tensor:
        """Return :meth:`add`, without a gradient."""
        return self.kernels.sum_rows(y, self.places, self.all_placed)


class _LinearMap(torch.autograd.Function):
    """A linear map; its adjoint is the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, apply: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.adjoint = adjoint
        return apply(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(dy), None, None


class Tokens(NamedTuple):
    """Tokens on the rank of their experts."""

    # ``[N, H]``
    x: Tensor
    # Choices ``[N, K]``, as numbers of this rank's experts; E for experts of other ranks and for none.
    experts: Tensor
    # Weights of the choices ``[N, K]``, in at least fp32.
    weights: Tensor
    # Number of the rows of experts that they need, or of a buffer for them.
    rows: int
    # Every choice has a row.
    complete: bool
    # 0-d, True if tokens or their rows did not fit; None where that cannot happen.
    overflowed: Tensor | None = None


@dataclass(frozen=True)
class ExpertRows:
    """The rows of this rank's experts, sorted by expert; those after the last choice are padding."""

    rows: RowCopies
    # Cumulative numbers of the rows of the experts, int32 [E].
    offsets: Tensor
    # Rows as copies of choices, for their weights.
    choices: RowCopies

    @classmethod
    def of(cls, tokens: Tokens, experts: int, kernels: RowKernels = TORCH_ROWS) -> ExpertRows:
        """Expand tokens to a row for each of their choices."""
        topk, count = tokens.experts.shape[1], tokens.rows
        ordered = kernels.sort_keys(tokens.experts, experts, experts)
        order, places, offsets = ordered.order[:count], ordered.places, ordered.ends
        if not tokens.complete:
            places = places.where(places < offsets[-1:], count)
            offsets = offsets.clamp(max=count)
        rows = RowCopies(order // topk, places.view(-1, topk), True, tokens.complete, kernels)
        return cls(rows, offsets, RowCopies(order, places.view(-1, 1), True, tokens.complete, kernels))

    def weights(self, weights_NK: Tensor) -> Tensor:
        """Return the weight of every row ``[R]``."""
        return self.choices.copy(weights_NK.reshape(-1, 1)).squeeze(1)


# ---- Exchanges


class Exchange(ABC):
    """The tokens of a micro-batch on their way, created by :meth:`Dispatcher.dispatch`."""

    @abstractmethod
    def wait(self) -> Tokens:
        """Wait for the tokens of this rank's experts."""

    @abstractmethod
    def combine(self, y_NH: Tensor) -> Callable[[], Tensor]:
        """Start to return the results of the tokens that :meth:`wait` gave.

        Returns:
            A function that waits, and returns the sums of the results of this rank's tokens ``[T, H]``.
        """


@dataclass(frozen=True)
class Dispatcher(ABC):
    """Moves tokens between the ranks that together hold all experts; plugins register others by name.

    All methods are differentiable, and collective over the group.
    """

    # The ranks, ordered by EP first, then by expert-TP. A token goes to all expert-TP ranks of an expert, each of which
    # computes a partial sum.
    group: Group
    tp_size: int
    # Of all ranks.
    experts: int
    topk: int
    kernels: RowKernels = TORCH_ROWS
    # ``--moe-exchange-bound``
    bound: float = 1.0

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.experts * self.tp_size // self.group.size

    @abstractmethod
    def dispatch(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, drops: bool) -> Exchange:
        """Start to send tokens to the ranks of their experts.

        Args:
            x_TH: the tokens.
            experts_TK: their choices, each an expert, all different, or ``experts`` for a choice that is dropped.
            weights_TK: weights of the choices, in at least fp32.
            drops: choices may be dropped.
        """


@dataclass(frozen=True)
class LocalDispatcher(Dispatcher):
    """All experts are on this rank."""

    def dispatch(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, drops: bool) -> Exchange:
        """See :class:`Dispatcher`."""
        return _LocalExchange(Tokens(x_TH, experts_TK, weights_TK, experts_TK.numel(), not drops))


@dataclass(frozen=True)
class _LocalExchange(Exchange):
    tokens: Tokens

    def wait(self) -> Tokens:
        return self.tokens

    def combine(self, y_NH: Tensor) -> Callable[[], Tensor]:
        return lambda: y_NH


@dataclass(frozen=True)
class _RankExchange(Exchange):
    """Rows on their way to P ranks, and how to return them."""

    dispatcher: Dispatcher
    # Rows that are sent, as copies of tokens.
    rows: RowCopies
    # Rows for each rank and from each rank; None for blocks of equal size.
    sent: list[int] | None
    received: list[int] | None
    x: Callable[[], Tensor]
    choices: Callable[[], Tensor]
    # See :class:`Tokens`.
    expert_rows: int
    # 0-d, True if rows did not fit in a block; None where all do.
    overflowed: Tensor | None = None

    @classmethod
    def start(
        cls,
        dispatcher: Dispatcher,
        rows: RowCopies,
        splits: tuple[list[int] | None, list[int] | None],
        tokens: tuple[Tensor, Tensor, Tensor],
        expert_rows: int,
        overflowed: Tensor | None = None,
    ) -> _RankExchange:
        """Send rows with their choices: numbers of experts plus 1, so that rows of zeros have none."""
        x_TH, experts_TK, weights_TK = tokens
        choices = torch.cat([weights_TK, (experts_TK + 1).to(weights_TK.dtype)], 1)
        waits = [mappings.start_all_to_all(rows.copy(t), *splits, dispatcher.group) for t in (choices, x_TH)]
        return cls(dispatcher, rows, *splits, waits[1], waits[0], expert_rows, overflowed)

    def wait(self) -> Tokens:
        dispatcher = self.dispatcher
        weights_NK, numbers_NK = self.choices().chunk(2, 1)
        first = dispatcher.group.rank // dispatcher.tp_size * dispatcher.local
        experts_NK = numbers_NK.detach().to(torch.int32) - (1 + first)
        elsewhere = (experts_NK < 0) | (experts_NK > dispatcher.local)
        experts_NK = experts_NK.masked_fill(elsewhere, dispatcher.local)
        overflowed = None
        if self.overflowed is not None:
            no_room = (experts_NK < dispatcher.local).sum() > self.expert_rows
            weights_NK = weights_NK.masked_fill(no_room, torch.nan)
            overflowed = self.overflowed | no_room
        return Tokens(self.x(), experts_NK, weights_NK, self.expert_rows, False, overflowed)

    def combine(self, y_NH: Tensor) -> Callable[[], Tensor]:
        back = mappings.start_all_to_all(y_NH, self.received, self.sent, self.dispatcher.group)
        return lambda: self.rows.add(back())


@dataclass(frozen=True)
class _Targets:
    """The rows that a rank has to send: one for each token and rank that holds some of its experts."""

    # Rank of every choice, P for a choice without a row [T, K x expert-TP].
    keys: Tensor
    # Sorts them by rank.
    ordered: SortedKeys
    # EP rank of every choice, EP size for dropped ones [T, K].
    ranks: Tensor

    @classmethod
    def of(cls, experts_TK: Tensor, dispatcher: Dispatcher) -> _Targets:
        """Find the ranks of all choices; only the first of a token's choices on a rank has a row there."""
        size, tp_size = dispatcher.group.size, dispatcher.tp_size
        ranks_TK = experts_TK // dispatcher.local
        repeated_TK = (ranks_TK.unsqueeze(2) == ranks_TK.unsqueeze(1)).tril(-1).any(2)
        keys = ranks_TK.masked_fill(repeated_TK, size // tp_size)
        if tp_size > 1:
            numbers = torch.arange(tp_size, device=keys.device)
            keys = (keys.unsqueeze(-1) * tp_size + numbers).flatten(1).clamp(max=size)
        return cls(keys, dispatcher.kernels.sort_keys(keys, size, size), ranks_TK)


@dataclass(frozen=True)
class ExactDispatcher(Dispatcher):
    """Sends as many rows as there are; the host reads their numbers."""

    def dispatch(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, drops: bool) -> Exchange:
        """See :class:`Dispatcher`; synchronises host and device."""
        size, targets = self.group.size, _Targets.of(experts_TK, self)
        ends = targets.ordered.ends.long()
        numbers = torch.arange(size, device=ends.device) // self.tp_size
        choices_P = (targets.ranks.flatten() == numbers.unsqueeze(1)).sum(1)
        counts_P2 = torch.stack([ends.diff(prepend=ends.new_zeros(1)), choices_P], 1)
        received_P2 = comm.start_all_to_all(counts_P2, self.group).wait()
        # One transfer, so that the host waits once.
        on_host = torch.cat([counts_P2[:, 0], received_P2[:, 0], received_P2[:, 1].sum(0, keepdim=True)]).tolist()
        sent, received, expert_rows = on_host[:size], on_host[size:-1], on_host[-1]
        total, copies = sum(sent), targets.keys.shape[1]
        source = targets.ordered.order[:total] // copies
        places = targets.ordered.places.clamp(max=total).view(-1, copies)
        rows = RowCopies(source, places, True, total == len(targets.ordered.order), self.kernels)
        return _RankExchange.start(self, rows, (sent, received), (x_TH, experts_TK, weights_TK), expert_rows)


@dataclass(frozen=True)
class BoundedDispatcher(Dispatcher):
    """Sends a block of fixed size to every rank; :class:`ExchangeBuffers` has the sizes."""

    def buffers(self, tokens: int) -> ExchangeBuffers:
        """Return the rows of the buffers."""
        ep, bound = self.group.size // self.tp_size, self.bound
        return ExchangeBuffers.of(bound, tokens, self.topk, self.local, ep, self.tp_size)

    def dispatch(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, drops: bool) -> Exchange:
        """See :class:`Dispatcher`; all ranks need the same number of tokens."""
        tokens, size, targets = len(x_TH), self.group.size, _Targets.of(experts_TK, self)
        buffers, copies = self.buffers(tokens), targets.keys.shape[1]
        block = buffers.block
        (order, places, ends), keys = targets.ordered, targets.keys.flatten()
        starts = torch.cat([ends.new_zeros(1), ends])
        within = places - starts.index_select(0, keys)
        fits = (keys < size) & (within < block)
        places = (keys * block + within).where(fits, size * block)
        source = torch.full((size * block + 1,), tokens, device=order.device)
        source.scatter_(0, places, torch.arange(len(places), device=order.device) // copies)
        overflowed = None
        if buffers.expert_rows < size * tokens * min(self.topk, self.local):
            overflowed = (starts.diff() > block).any()
            weights_TK = weights_TK.masked_fill(overflowed, torch.nan)
        rows = RowCopies(source[:-1], places.view(-1, copies), False, False, self.kernels)
        sent = (x_TH, experts_TK, weights_TK)
        return _RankExchange.start(self, rows, (None, None), sent, buffers.expert_rows, overflowed)


DISPATCHERS: dict[str, type[Dispatcher]] = {"exact": ExactDispatcher, "bounded": BoundedDispatcher}
"""Dispatchers by the names of ``--moe-exchange``; plugins register further ones as ``dispatcher``."""


def build_dispatchers(model: ModelConfig, context: BuildContext) -> tuple[Dispatcher, Dispatcher]:
    """Return the dispatchers of training steps, and of everything else, where ranks may have other numbers of tokens.

    Without EP, all ranks of expert-TP get all tokens: then the blocks of the bounded exchange are always full.
    """
    parallel, kernels = context.parallel, context.kernels.rows
    group, tp_size = context.mesh.group("ep", "etp"), context.mesh.layout.sizes["etp"]
    arguments = group, tp_size, model.num_experts or 0, model.moe_router_topk, kernels
    if group.size == 1:
        return LocalDispatcher(*arguments), LocalDispatcher(*arguments)
    name = parallel.moe_exchange
    if name in registered("dispatcher"):
        made: Dispatcher = registered("dispatcher")[name](*arguments, parallel.moe_exchange_bound)
        return made, made
    exact = ExactDispatcher(*arguments)
    if group.size == tp_size:
        return BoundedDispatcher(*arguments), exact
    return DISPATCHERS[name](*arguments, parallel.moe_exchange_bound), exact
