"""Activation recomputation inside a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


_recomputing = ContextVar("recomputing", default=False)


def is_recomputing() -> bool:
    """Return True in a function that backward computes again: what it counts has been counted in forward."""
    return _recomputing.get()


@contextmanager
def _recomputation() -> Iterator[None]:
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


def recompute(function: Callable[..., T], *inputs: Any) -> T:
    """Return ``function(*inputs)``, keeping only the inputs for backward.

    Dropout is counter-based, so there is no random state to restore.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _recomputation()

    out: T = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return out


def recompute_producer(producer: Callable[[Tensor], Tensor], x: Tensor, consumer: Callable[[Tensor], T]) -> T:
    """Return ``consumer(producer(x))``; the tensor between them is recomputed in backward.

    Checkpointing the producer alone would save nothing, because the consumer keeps the producer's output as its own
    input. So wherever the consumer saves that tensor, a closure that recomputes it from ``x`` is saved instead. Hooks
    around this call, such as those of activation offload, get the other tensors that the consumer saves.
    """
    if not torch.is_grad_enabled():
        return consumer(producer(x))
    between = recompute(producer, x)
    address, shape = between.data_ptr(), between.shape
    recomputed = _RecomputedTensor(producer, x)

    # The innermost hooks, which these replace; torch reads them so, too (torch/_functorch).
    keep, take = torch._C._autograd._top_saved_tensors_default_hooks(False) or (
        lambda saved: saved,
        lambda saved: saved,
    )

    def pack(t: Tensor) -> Any:
        return recomputed if t.data_ptr() == address and t.shape == shape else keep(t)

    def unpack(saved: Any) -> Tensor:
        tensor: Tensor = saved.compute() if isinstance(saved, _RecomputedTensor) else take(saved)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return consumer(between)


class _RecomputedTensor:
    def __init__(self, producer: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.producer, self.x = producer, x.detach()

    def compute(self) -> Tensor:
        with torch.no_grad():
            return self.producer(self.x)
