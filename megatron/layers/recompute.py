"""Trading memory for compute inside a block: an activation that is dropped and made again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


def recompute(function: Callable[..., T], *inputs: Any) -> T:
    """``function(*inputs)``, keeping only the inputs for backward; counter-based random numbers need no state."""
    out: T = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out


def feed(producer: Callable[[Tensor], Tensor], x: Tensor, consumer: Callable[[Tensor], T], drop: bool) -> T:
    """``consumer(producer(x))``; with ``drop`` neither keeps the tensor between them.

    Recomputing a cheap producer alone would save nothing, because its consumer keeps the output as its own input.
    So whatever the consumer saves of that tensor is replaced by the recipe for making it again from ``x``.
    """
    if not (drop and torch.is_grad_enabled()):
        return consumer(producer(x))
    between = recompute(producer, x)
    address, shape = between.data_ptr(), between.shape
    recipe = _Recipe(producer, x)

    def pack(t: Tensor) -> Tensor | _Recipe:
        return recipe if t.data_ptr() == address and t.shape == shape else t

    def unpack(saved: Tensor | _Recipe) -> Tensor:
        return saved.make() if isinstance(saved, _Recipe) else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return consumer(between)


class _Recipe:
    def __init__(self, producer: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.producer, self.x = producer, x.detach()

    def make(self) -> Tensor:
        with torch.no_grad():
            return self.producer(self.x)
