"""Faults of recurrences: states, convolutions and heads over documents and context-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.distributed import mappings
from megatron.distributed.context_parallel import ContextParallel
from megatron.layers import mamba
from megatron.layers.context import ForwardContext
from megatron.layers.recurrence import CausalConv, Recurrence, RecurrentRows


def state_not_reset_in_a_chunk() -> AbstractContextManager[Any]:
    """Tokens of a chunk are scanned as one document."""
    return patch.object(RecurrentRows, "own_runs", property(lambda rows: None))


def state_not_reset_between_chunks() -> AbstractContextManager[Any]:
    """Tokens see the state before their chunk whatever their document is."""
    original = Recurrence.rows

    def rows(self: Recurrence, ctx: ForwardContext) -> RecurrentRows:
        return replace(original(self, ctx), seen=None)

    return patch.object(Recurrence, "rows", rows)


def convolution_of_other_documents() -> AbstractContextManager[Any]:
    """The convolution reaches back into the document before."""
    original = RecurrentRows.convolve

    def convolve(self: RecurrentRows, x: Tensor, weight: Tensor, bias: Tensor | None, kernel: CausalConv) -> Tensor:
        return original(self, x, weight, bias, lambda *arguments: kernel(*arguments[:3], None))

    return patch.object(RecurrentRows, "convolve", convolve)


def rows_before_a_chunk_lost() -> AbstractContextManager[Any]:
    """The convolution of every chunk begins with zeros."""
    original = RecurrentRows._rows_before
    return patch.object(RecurrentRows, "_rows_before", lambda self, x: torch.zeros_like(original(self, x)))


def gradient_of_the_rows_before_lost() -> AbstractContextManager[Any]:
    """Rows before a chunk learn from their own chunk only."""
    original = RecurrentRows._rows_before
    return patch.object(RecurrentRows, "_rows_before", lambda self, x: original(self, x.detach()))


def _with_chunks(change: Callable[[ContextParallel, Tensor], Tensor]) -> AbstractContextManager[Any]:
    """Change the gathered values of all chunks, in the order of the sequence: states, or rows of the convolution."""
    original = ContextParallel.gather_chunks
    return patch.object(ContextParallel, "gather_chunks", lambda self, x: change(self, original(self, x)))


def chunks_in_the_order_of_ranks() -> AbstractContextManager[Any]:
    """Both chunks of a rank follow each other."""
    return _with_chunks(lambda cp, x: torch.stack((x[: cp.ring.size], x[cp.ring.size :].flip(0)), 1).flatten(0, 1))


def chunks_of_the_next_rank() -> AbstractContextManager[Any]:
    """A rank's chunks are taken for those of the one before it."""

    def change(cp: ContextParallel, x: Tensor) -> Tensor:
        return torch.cat((x[: cp.ring.size].roll(-1, 0), x[cp.ring.size :].roll(1, 0)))

    return _with_chunks(change)


def halves_swapped() -> AbstractContextManager[Any]:
    """The two chunks of a rank are taken for each other."""
    return _with_chunks(lambda cp, x: x.flip(0))


def gradient_of_passed_states_lost() -> AbstractContextManager[Any]:
    """A rank learns from its own tokens only what its states do."""
    return _with_chunks(lambda cp, x: x.detach())


def _with_transitions(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> AbstractContextManager[Any]:
    original = RecurrentRows.state_before

    def state_before(self: RecurrentRows, transition: Tensor, state: Tensor) -> Tensor:
        return original(self, *change(transition, state))

    return patch.object(RecurrentRows, "state_before", state_before)


def decay_applied_twice() -> AbstractContextManager[Any]:
    """A state decays twice on its way through a chunk."""
    return _with_transitions(lambda t, state: (t @ t if t.ndim == state.ndim else t * t, state))


def decay_without_gradient() -> AbstractContextManager[Any]:
    """The transition of a chunk has no gradient."""
    return _with_transitions(lambda t, state: (t.detach(), state))


def parameters_of_other_heads() -> AbstractContextManager[Any]:
    """After the exchange of heads, ranks use the parameters of the next rank's heads."""
    original = RecurrentRows.own_heads

    def own_heads(self: RecurrentRows, parameter: Tensor) -> Tensor:
        return original(self, parameter.roll(len(parameter) // self.head_ranks, 0))

    return patch.object(RecurrentRows, "own_heads", own_heads)


def sum_of_squares_kept_local() -> AbstractContextManager[Any]:
    """The norm over all channels divides by the RMS of a rank's own."""
    local = SimpleNamespace(reduce_from_region=lambda x, group: x * group.size, copy_to_region=mappings.copy_to_region)
    return patch.object(mamba, "mappings", local)


def gradient_of_the_sum_of_squares_kept_local() -> AbstractContextManager[Any]:
    """In backward, it gets the gradient of a rank's own channels."""
    kept = SimpleNamespace(reduce_from_region=mappings.reduce_from_region, copy_to_region=lambda x, group: x)
    return patch.object(mamba, "mappings", kept)
