"""Activation recomputation inside a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")

Tensors = Tensor | tuple[Tensor, ...]


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


def recompute_producer(producer: Callable[..., Tensors], consumer: Callable[..., T], *inputs: Any) -> T:
    """Return ``consumer(*producer(*inputs))``; the tensors between them are computed again in backward, once.

    Checkpointing the producer alone would save nothing, because the consumer keeps the producer's outputs as its own
    inputs. So wherever the consumer saves one of them, or a view of one, its place in it is saved instead. Hooks around
    this call, such as those of activation offload, get the other tensors that the consumer saves, and the inputs of the
    producer.

    Args:
        producer: returns a tensor or a tuple of them.
        consumer: takes these.
        inputs: of the producer.
    """
    if not torch.is_grad_enabled():
        return consumer(*_as_tuple(producer(*inputs)))
    recomputed = _Outputs()
    between: tuple[Tensor, ...] = recompute(partial(recomputed.of, producer), *inputs)
    recomputed.node = next((t.grad_fn for t in between if t.requires_grad), None)
    if recomputed.node is None:
        return consumer(*between)
    # By address of the memory: the hooks live as long as what is saved, and must not keep the tensors.
    places = {t.untyped_storage().data_ptr(): (index, int(t.storage_offset())) for index, t in enumerate(between)}

    # The innermost hooks, which these replace; torch reads them so, too (torch/_functorch). Without any, a saved output
    # is detached: with its node it would be a cycle, which lives on if backward does not reach the node.
    keep, take = torch._C._autograd._top_saved_tensors_default_hooks(False) or (Tensor.detach, lambda saved: saved)

    def pack(t: Tensor) -> Any:
        address = t.untyped_storage().data_ptr()
        if address not in places:
            return keep(t)
        index, start = places[address]
        return _View(recomputed, index, t.shape, t.stride(), int(t.storage_offset()) - start)

    def unpack(saved: Any) -> Tensor:
        tensor: Tensor = saved.compute() if isinstance(saved, _View) else take(saved)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return consumer(*between)


class _Outputs:
    """Outputs of a producer, once backward has computed them again."""

    def __init__(self) -> None:
        self.node: Any = None
        self._calls = 0
        self._found: list[Tensor] = []

    def of(self, producer: Callable[..., Tensors], *inputs: Any) -> tuple[Tensor, ...]:
        """Return the outputs."""
        outputs = _as_tuple(producer(*inputs))
        self._calls += 1
        if self._calls > 1:
            self._found = [t.detach() for t in outputs]
        marked: tuple[Tensor, ...] = _Mark.apply(self, *outputs)
        return marked

    def get(self, index: int) -> Tensor:
        """Return an output; the first call computes them."""
        if not self._found:
            _ = self.node.saved_tensors  # torch computes all that the checkpointed function has saved, and keeps it
        return self._found[index]

    def release(self) -> None:
        """Forget the outputs, which no node of the consumer needs any more."""
        self._found = []


class _Mark(torch.autograd.Function):
    """Identity after a producer, whose saved tensor is the last of what its checkpoint computes again."""

    @staticmethod
    def forward(ctx: Any, outputs: _Outputs, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.outputs = outputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(torch.empty(0))
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.outputs.release()
        return None, *grads


class _View(NamedTuple):
    """Place of a saved tensor in an output of a producer."""

    outputs: _Outputs
    output: int
    size: torch.Size
    stride: tuple[int, ...]
    # From the first element of the output.
    offset: int

    def compute(self) -> Tensor:
        output = self.outputs.get(self.output)
        return output.as_strided(self.size, self.stride, output.storage_offset() + self.offset)


def _as_tuple(outputs: Tensors) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs
