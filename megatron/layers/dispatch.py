"""Rows of tokens on their way to the experts that compute them, and back.

None is dropped: whoever is chosen computes, however many come. So how many rows travel is known only once they are
counted, and the host waits for these counts once in every layer.

T tokens of this rank, K experts of each, C = K x TP inside experts, R rows that come to this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel import collectives, comm
from megatron.parallel.comm import Group


class _Permute(torch.autograd.Function):
    """``y[i] = x[order[i]]``, backward ``dx[order[i]] = dy[i]``; ``place`` is the inverse of ``order``.

    Both only read in any order, so that equal runs are equal to the bit on GPUs too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy[ctx.saved_tensors[0]], None, None


@dataclass(frozen=True)
class Permutation:
    """A new order of rows, and the way back."""

    order: Tensor
    place: Tensor

    @classmethod
    def sorting(cls, keys: Tensor) -> Permutation:
        """The order in which ``keys`` ascend; equal ones keep theirs."""
        order = keys.argsort(stable=True)
        return cls(order, order.argsort())

    def __call__(self, x: Tensor) -> Tensor:
        """The rows of ``x`` in this order."""
        y: Tensor = _Permute.apply(x, self.order, self.place)
        return y

    def undo(self, y: Tensor) -> Tensor:
        """The rows of ``y`` as they were before."""
        x: Tensor = _Permute.apply(y, self.place, self.order)
        return x


@dataclass(frozen=True)
class Route:
    """Which rows go where.

    A token goes to all ranks that share one of its experts, each of which computes a part of it; the parts are added
    up where the token came from. The ranks of the group are ordered by EP first, then by TP inside experts.

    Attributes:
        by_target: this rank's T x C rows, by the rank and the expert that they go to.
        sent: how many go to each rank.
        received: how many come from each.
        by_expert: the R rows that come, by their expert.
        counts: how many come for each expert of this rank.
        group: the ranks that hold all experts.
    """

    by_target: Permutation
    sent: tuple[int, ...]
    received: tuple[int, ...]
    by_expert: Permutation
    counts: tuple[int, ...]
    group: Group

    @classmethod
    def plan(cls, experts_TK: Tensor, experts: int, tp_size: int, group: Group) -> Route:
        """Where the chosen experts are; collective, and waits for the device.

        Args:
            experts_TK: number of every chosen expert.
            experts: how many there are.
            tp_size: TP inside experts.
            group: the ranks that hold all of them.

        """
        held = experts * tp_size // group.size
        ranks = experts_TK.unsqueeze(-1) // held * tp_size + torch.arange(tp_size, device=experts_TK.device)
        keys = (ranks * held + experts_TK.unsqueeze(-1) % held).flatten()
        leaving = keys.new_zeros(group.size * held).index_add_(0, keys, torch.ones_like(keys)).view(group.size, held)
        coming = comm.start_all_to_all(leaving, group).wait()
        numbers = torch.arange(held, device=keys.device).repeat(group.size)
        on_host = torch.cat((leaving.sum(1), coming.sum(1), coming.sum(0))).tolist()  # in one piece: one wait
        sent, received, counts = on_host[: group.size], on_host[group.size : -held], on_host[-held:]
        by_expert = Permutation.sorting(numbers.repeat_interleave(coming.flatten(), output_size=sum(received)))
        return cls(Permutation.sorting(keys), tuple(sent), tuple(received), by_expert, tuple(counts), group)

    def there(self, x_TH: Tensor) -> Tensor:
        """Bring every token to its experts: ``[T, H] -> [R, H]``, by expert."""
        copies = len(self.by_target.order) // x_TH.shape[0]
        rows = self.by_target(x_TH.unsqueeze(1).expand(-1, copies, -1).flatten(0, 1))
        return self.by_expert(collectives.exchange_rows(rows, self.sent, self.received, self.group))

    def back(self, y_RH: Tensor, tokens: int) -> Tensor:
        """Bring results to where their tokens came from: ``[R, H] -> [T, C, H]``."""
        rows = collectives.exchange_rows(self.by_expert.undo(y_RH), self.received, self.sent, self.group)
        return self.by_target.undo(rows).unflatten(0, (tokens, -1))
