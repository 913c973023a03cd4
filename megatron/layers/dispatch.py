"""Token dispatch of a mixture of experts: rows go to the ranks of their experts, and results come back.

Shapes: T tokens of this rank, H hidden, K experts per token, C = K x expert-TP, R rows that this rank receives, sorted
by expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.distributed import comm, mappings
from megatron.distributed.comm import Group


class _Permute(torch.autograd.Function):
    """``y[i] = x[order[i]]``, backward ``dx[order[i]] = dy[i]``.

    Both directions are gathers rather than scatters with atomics, so results are bitwise reproducible on GPUs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy[ctx.saved_tensors[0]], None, None


@dataclass(frozen=True)
class Permutation:
    """A permutation of rows and its inverse."""

    order: Tensor
    inverse: Tensor

    @classmethod
    def sorting(cls, keys: Tensor) -> Permutation:
        """Return the stable permutation that sorts ``keys``."""
        order = keys.argsort(stable=True)
        return cls(order, order.argsort())

    def __call__(self, x: Tensor) -> Tensor:
        """Permute the rows of ``x``."""
        y: Tensor = _Permute.apply(x, self.order, self.inverse)
        return y

    def undo(self, y: Tensor) -> Tensor:
        """Restore the original order of the rows of ``y``."""
        x: Tensor = _Permute.apply(y, self.inverse, self.order)
        return x


@dataclass(frozen=True)
class DispatchPlan:
    """The all-to-all of one MoE layer and micro-batch.

    A token is sent to all expert-TP ranks that hold one of its experts. Each computes a partial sum, and the rank that
    sent the token adds them up.
    """

    # Sorts this rank's T x C rows by target rank, then by expert.
    by_target: Permutation
    # Rows sent to and received from each rank.
    sent: tuple[int, ...]
    received: tuple[int, ...]
    # Sorts the R received rows by expert.
    by_expert: Permutation
    # Cumulative numbers of the rows received for the experts of this rank, int32 on the device.
    offsets: Tensor
    # The ranks that together hold all experts, ordered by EP first, then by expert-TP.
    group: Group

    @classmethod
    def plan(cls, experts_TK: Tensor, experts: int, tp_size: int, group: Group) -> DispatchPlan:
        """Exchange row counts and plan the all-to-all. Collective; synchronises host and device.

        Args:
            experts_TK: indices of the chosen experts.
            experts: number of experts.
            tp_size: expert-TP.
            group: the ranks that together hold all experts.

        """
        local = experts * tp_size // group.size  # experts per rank
        ranks = experts_TK.unsqueeze(-1) // local * tp_size + torch.arange(tp_size, device=experts_TK.device)
        keys = (ranks * local + experts_TK.unsqueeze(-1) % local).flatten()
        sent_counts = keys.new_zeros(group.size * local).index_add_(0, keys, torch.ones_like(keys))
        sent_counts = sent_counts.view(group.size, local)
        received_counts = comm.start_all_to_all(sent_counts, group).wait()
        # One transfer, so that the host waits once.
        on_host = torch.cat((sent_counts.sum(1), received_counts.sum(1))).tolist()
        sent, received = on_host[: group.size], on_host[group.size :]
        local_experts = torch.arange(local, device=keys.device).repeat(group.size)
        received_experts = local_experts.repeat_interleave(received_counts.flatten(), output_size=sum(received))
        by_expert = Permutation.sorting(received_experts)
        offsets = received_counts.sum(0).cumsum(0, dtype=torch.int32)
        return cls(Permutation.sorting(keys), tuple(sent), tuple(received), by_expert, offsets, group)

    def dispatch(self, x_TH: Tensor) -> Tensor:
        """Send every token to its experts: ``[T, H] -> [R, H]``, sorted by expert."""
        copies = len(self.by_target.order) // x_TH.shape[0]
        rows = self.by_target(x_TH.unsqueeze(1).expand(-1, copies, -1).flatten(0, 1))
        return self.by_expert(mappings.all_to_all(rows, self.sent, self.received, self.group))

    def combine(self, y_RH: Tensor, tokens: int) -> Tensor:
        """Return results to the ranks of their tokens: ``[R, H] -> [T, C, H]``."""
        rows = mappings.all_to_all(self.by_expert.undo(y_RH), self.received, self.sent, self.group)
        return self.by_target.undo(rows).unflatten(0, (tokens, -1))
