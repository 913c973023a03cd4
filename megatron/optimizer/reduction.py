"""Sums of one gradient bucket over data-parallel ranks.

A reduction has two steps: a reduce-scatter over the ranks that shard the optimizer state (``shards``), which leaves
each rank the part that it updates, and an all-reduce of that part over the ranks that hold the same one (``copies``).
Without ZeRO there is only the all-reduce. :class:`Reduction` communicates gradients as they are,
:class:`RoundedReduction` in 16 bits; those of :mod:`megatron.optimizer.grad_compression` send less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.distributed import comm
from megatron.distributed.comm import Group, Pending
from megatron.distributed.param_layout import MatrixBlock


@dataclass
class ReduceHandle:
    """A reduction in flight."""

    pending: Pending
    # Computes the sum from what was communicated.
    finish: Callable[[Tensor], Tensor] = lambda x: x

    def wait(self) -> Tensor:
        """Wait for the sum, and return it flat."""
        return self.finish(self.pending.wait())


class Reduction:
    """Sums gradients as they are."""

    # A reduction in flight needs as much memory as the gradients.
    copies_gradients = False
    # What this rank has not sent yet, in the layout of its part; None for a reduction that sends everything.
    error: Tensor | None = None

    def __init__(self, shards: Group, copies: Group) -> None:
        """Create the reduction.

        Args:
            shards: the ranks that shard the bucket.
            copies: the ranks that hold the same part.
        """
        self.shards, self.copies = shards, copies

    def start_reduce_scatter(self, x: Tensor) -> ReduceHandle:
        """Start summing a bucket ``[n]`` over ``shards``; the result is this rank's part ``[n / shards]``.

        ``x`` must not change until the sum is complete. On GPUs the sum overwrites this rank's part of it.
        """
        return ReduceHandle(comm.start_reduce_scatter(x, self.shards, x.view(self.shards.size, -1)[self.shards.rank]))

    def start_all_reduce(self, part: Tensor) -> ReduceHandle:
        """Start summing a part over ``copies``; the sum may overwrite ``part``."""
        return ReduceHandle(comm.start_all_reduce(part, self.copies))

    def start_step(self, step: int) -> None:
        """Begin a step, and forget what an aborted one has left; ``step`` is the number of steps taken before."""

    def commit(self, skipped: Tensor) -> None:
        """Keep the state after a step, unless the scalar ``skipped`` is not 0; without synchronisation."""

    def reset(self) -> None:
        """Return to the initial state."""

    def factors(self) -> Sequence[tuple[MatrixBlock, Tensor]]:
        """Return state that belongs to matrices of the part, equal on all ``copies``."""
        return ()


class RoundedReduction(Reduction):
    """Sums gradients in their dtype, but communicates them in a shorter one: each addend is rounded once.

    The sum of an all-reduce is rounded once more.
    """

    copies_gradients = True

    def __init__(self, shards: Group, copies: Group, comm_dtype: torch.dtype) -> None:
        """Create the reduction; ``comm_dtype`` is that of communication."""
        super().__init__(shards, copies)
        self._comm_dtype = comm_dtype

    def start_reduce_scatter(self, x: Tensor) -> ReduceHandle:
        """Start summing a bucket ``[n]`` over ``shards``; the result is this rank's part ``[n / shards]``."""
        return super().start_reduce_scatter(x) if self.shards.size == 1 else self._start_sum(x, self.shards)

    def start_all_reduce(self, part: Tensor) -> ReduceHandle:
        """Start summing a part over ``copies``, whose number divides its length."""
        if self.copies.size == 1:
            return super().start_all_reduce(part)
        addends = self._start_sum(part, self.copies)

        def finish(received: Tensor) -> Tensor:
            own = addends.finish(received).to(self._comm_dtype)
            return comm.all_gather(own, self.copies).to(part.dtype)

        return ReduceHandle(addends.pending, finish)

    def _start_sum(self, x: Tensor, group: Group) -> ReduceHandle:
        """Start a reduce-scatter: each rank receives the addends of its part, and adds them in rank order."""
        addends = comm.start_all_to_all(x.to(self._comm_dtype), group)
        return ReduceHandle(addends, lambda parts: parts.view(group.size, -1).sum(0, dtype=x.dtype))
