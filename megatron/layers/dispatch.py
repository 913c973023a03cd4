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
            :class:`MeasuringDispatcher` finds the bound that would have been enough.
==========  ===================================================================================================

Nothing waits for the device but the exact exchange, and all sums are gathers: results are bitwise reproducible.

Shapes: T tokens of this rank, H hidden, K experts per token, P ranks, S rows sent, N tokens that arrive, E experts of
this rank, R rows of experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.config.dispatch import ExchangeBuffers
from megatron.config.model import ModelConfig
from megatron.config.plugins import registered
from megatron.distributed import comm, mappings
from megatron.distributed.comm import Group
from megatron.kernels.rows import TORCH_ROWS, Ranks, RowKernels
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
        rows: Tensor = _SumRows.apply(x, *self._copied, *self._placed, self.kernels.sum_rows)
        return rows

    def add(self, y: Tensor) -> Tensor:
        """Return the sum of its rows for every item: ``[R, H] -> [N, H]``. Adjoint of :meth:`copy`."""
        items: Tensor = _SumRows.apply(y, *self._placed, *self._copied, self.kernels.sum_rows)
        return items

    @property
    def _copied(self) -> tuple[Tensor, bool]:
        return self.source.unsqueeze(1), self.all_copied

    @property
    def _placed(self) -> tuple[Tensor, bool]:
        return self.places, self.all_placed


class _SumRows(torch.autograd.Function):
    """Sums of rows, whose adjoint is sums of other rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        places: Tensor,
        complete: bool,
        adjoint_places: Tensor,
        adjoint_complete: bool,
        sum_rows: Callable[[Tensor, Tensor, bool], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(adjoint_places)
        ctx.sum, ctx.complete = sum_rows, adjoint_complete
        return sum_rows(x, places, complete)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return ctx.sum(dy, *ctx.saved_tensors, ctx.complete), None, None, None, None, None


class Tokens(NamedTuple):
    """Tokens on the rank of their experts."""

    # ``[N, H]``
    x: Tensor
    # Choices ``[N, K]``, of any dtype; those outside of ``first`` ... ``first + E`` are experts of other ranks or none.
    experts: Tensor
    # Weights of the choices ``[N, K]``, in at least fp32; further columns are not read.
    weights: Tensor
    # Number of the rows of experts that they need, or of a buffer for them.
    rows: int
    # Every choice has a row.
    complete: bool
    # Number of this rank's first expert in ``experts``.
    first: int = 0
    # 0-d, becomes True if the rows do not fit; None where that cannot happen.
    overflowed: Tensor | None = None


@dataclass(frozen=True)
class ExpertRows:
    """The rows of this rank's experts, sorted by expert; those after the last choice are padding."""

    rows: RowCopies
    # Cumulative numbers of the rows of the experts, int32 [E].
    offsets: Tensor
    # Weight of every row [R].
    weights: Tensor

    @classmethod
    def of(cls, tokens: Tokens, experts: int, kernels: RowKernels = TORCH_ROWS) -> ExpertRows:
        """Expand tokens to a row for each of their choices."""
        weights, source, places, offsets = _PlaceChoices.apply(tokens.weights, tokens, experts, kernels)
        return cls(RowCopies(source, places, True, tokens.complete, kernels), offsets, weights)


class _PlaceChoices(torch.autograd.Function):
    """Weights of choices -> weights of rows."""

    @staticmethod
    def forward(
        ctx: Any, weights_NK: Tensor, tokens: Tokens, experts: int, kernels: RowKernels
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count = min(tokens.rows, tokens.experts.numel())
        made = kernels.place_choices(tokens.experts, weights_NK, tokens.first, experts, count, tokens.overflowed)
        ctx.save_for_backward(made.places)
        ctx.adjoint, ctx.width = kernels.gather_choices, weights_NK.shape[1]
        ctx.mark_non_differentiable(made.source, made.places, made.ends)
        ctx.set_materialize_grads(False)  # zeros for all of them
        return made.weights, made.source, made.places, made.ends

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights_R: Tensor | None, *_: None) -> tuple[Tensor | None, None, None, None]:
        dweights = None if dweights_R is None else ctx.adjoint(dweights_R, *ctx.saved_tensors, ctx.width)
        return dweights, None, None, None


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
    overflowed: Tensor | None = None

    @classmethod
    def start(
        cls,
        dispatcher: Dispatcher,
        rows: RowCopies,
        splits: tuple[list[int] | None, list[int] | None],
        x_TH: Tensor,
        choices_S2K: Tensor,
        expert_rows: int,
        overflowed: Tensor | None = None,
    ) -> _RankExchange:
        """Send rows and their choices: weights, and numbers of experts plus 1, so that rows of zeros have none."""
        waits = [mappings.start_all_to_all(t, *splits, dispatcher.group) for t in (choices_S2K, rows.copy(x_TH))]
        return cls(dispatcher, rows, *splits, waits[1], waits[0], expert_rows, overflowed)

    def wait(self) -> Tokens:
        dispatcher, choices_N2K = self.dispatcher, self.choices()
        numbers_NK = choices_N2K.detach()[:, dispatcher.topk :]
        first = 1 + dispatcher.group.rank // dispatcher.tp_size * dispatcher.local
        return Tokens(self.x(), numbers_NK, choices_N2K, self.expert_rows, False, first, self.overflowed)

    def combine(self, y_NH: Tensor) -> Callable[[], Tensor]:
        back = mappings.start_all_to_all(y_NH, self.received, self.sent, self.dispatcher.group)
        return lambda: self.rows.add(back())


class _SendRows(torch.autograd.Function):
    """Weights of choices -> choices of rows for ranks, as :class:`megatron.kernels.rows.SentRows`."""

    @staticmethod
    def forward(
        ctx: Any,
        weights_TK: Tensor,
        experts_TK: Tensor,
        dispatcher: Dispatcher,
        block: int | None,
        overflowed: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        kernels, tp_size = dispatcher.kernels, dispatcher.tp_size
        ranks = Ranks(dispatcher.local, dispatcher.group.size // tp_size, tp_size)
        made = kernels.send_rows(experts_TK, weights_TK, ranks, block, overflowed)
        ctx.save_for_backward(made.places)
        ctx.sum, ctx.topk = kernels.sum_rows, experts_TK.shape[1]
        ctx.mark_non_differentiable(made.source, made.places, made.counts)
        ctx.set_materialize_grads(False)
        return made.choices, made.source, made.places, made.counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dchoices_S2K: Tensor | None, *_: None) -> tuple[Tensor | None, None, None, None, None]:
        dweights = None if dchoices_S2K is None else ctx.sum(dchoices_S2K[:, : ctx.topk], *ctx.saved_tensors, False)
        return dweights, None, None, None, None


@dataclass(frozen=True)
class ExactDispatcher(Dispatcher):
    """Sends as many rows as there are; the host reads their numbers."""

    def dispatch(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, drops: bool) -> _RankExchange:
        """See :class:`Dispatcher`; synchronises host and device."""
        choices_S2K, source, places, counts_2E = _SendRows.apply(weights_TK, experts_TK, self, None, None)
        counts_P2 = counts_2E.t().repeat_interleave(self.tp_size, 0)
        received_P2 = comm.start_all_to_all(counts_P2, self.group).wait()
        # One transfer, so that the host waits once.
        (sent, _), (received, choices) = torch.stack([counts_P2, received_P2]).transpose(1, 2).tolist()
        total = sum(sent)
        rows = RowCopies(source[:total], places, True, total == places.numel(), self.kernels)
        return _RankExchange.start(self, rows, (sent, received), x_TH, choices_S2K[:total], sum(choices))


@dataclass(frozen=True)
class BoundedDispatcher(Dispatcher):
    """Sends a block of fixed size to every rank; :class:`ExchangeBuffers` has the sizes."""

    # 0-d, becomes True once tokens do not fit.
    overflowed: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.bool))

    def buffers(self, tokens: int) -> ExchangeBuffers:
        """Return the rows of the buffers."""
        ep, bound = self.group.size // self.tp_size, self.bound
        return ExchangeBuffers.of(bound, tokens, self.topk, self.local, ep, self.tp_size)

    def measuring(self) -> MeasuringDispatcher:
        """Return a dispatcher that measures what this one would have needed."""
        return MeasuringDispatcher(self.group, self.tp_size, self.experts, self.topk, self.kernels, self.bound)

    def dispatch(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, drops: bool) -> Exchange:
        """See :class:`Dispatcher`; all ranks need the same number of tokens."""
        tokens, buffers = len(x_TH), self.buffers(len(x_TH))
        may_overflow = buffers.expert_rows < self.group.size * tokens * min(self.topk, self.local)
        overflowed = self.overflowed if may_overflow else None
        choices_S2K, source, places, _ = _SendRows.apply(weights_TK, experts_TK, self, buffers.block, overflowed)
        rows = RowCopies(source, places, False, False, self.kernels)
        return _RankExchange.start(self, rows, (None, None), x_TH, choices_S2K, buffers.expert_rows, overflowed)


@dataclass(frozen=True)
class MeasuringDispatcher(ExactDispatcher):
    """Sends as many rows as there are, and keeps what the bounded exchange would have needed for them."""

    # The smallest bounds, and the rows for which the buffers of ``bound`` are too small.
    needs: list[tuple[float, str]] = field(default_factory=list)

    def dispatch(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, drops: bool) -> _RankExchange:
        """See :class:`Dispatcher`."""
        exchange = super().dispatch(x_TH, experts_TK, weights_TK, drops)
        sizes = len(x_TH), self.topk, self.local, self.group.size // self.tp_size, self.tp_size
        buffers = ExchangeBuffers.of(self.bound, *sizes)
        block, expert_rows = (ExchangeBuffers(max(exchange.sent or [0]), 0), ExchangeBuffers(0, exchange.expert_rows))
        for needed, name in ((block, "to send to a rank"), (expert_rows, "for its experts")):
            if (rows := max(needed)) > (limit := buffers[needed.index(rows)]):
                text = f"there are {rows} rows {name}, where --moe-exchange-bound {self.bound:g} holds {limit}"
                self.needs.append((needed.smallest_bound(*sizes), text))
        return exchange


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
    if name == "exact":
        return exact, exact
    overflowed = torch.zeros((), dtype=torch.bool, device=context.device)
    return BoundedDispatcher(*arguments, parallel.moe_exchange_bound, overflowed), exact
