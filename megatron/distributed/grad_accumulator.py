"""Accumulates parameter gradients into contiguous buffers, and defers weight gradients for W actions.

The backward of a linear layer passes ``(x, dy)``. Their product is added to the parameter's main gradient now, or
queued for a later W action of a zero-bubble schedule. ``Parameter.grad`` stays None throughout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from megatron.distributed import comm
from megatron.distributed.comm import Group, Pending
from megatron.kernels.linear import accumulate_wgrad


class Operand(Protocol):
    """An operand of a weight gradient, which may have to be gathered over the sequence-parallel ranks first."""

    def start(self) -> Operand:
        """Start the all-gather, if there is one."""

    def ungathered(self) -> Operand:
        """Return the operand without its gathered rows, to be gathered again later."""

    def wait(self) -> Any:
        """Return all rows."""


@dataclass
class WgradOperand:
    """An operand in the dtype of the activations."""

    # This rank's rows.
    shard: Tensor
    # The ranks that hold the others; None when the rows are complete.
    group: Group | None = None
    # The all-gather, once started.
    pending: Pending | None = None

    def start(self) -> WgradOperand:
        """Start the all-gather, if there is one."""
        if self.group is not None and self.pending is None:
            self.pending = comm.start_all_gather(self.shard, self.group)
        return self

    def ungathered(self) -> WgradOperand:
        """Return the operand without its gathered rows, to be gathered again later."""
        return WgradOperand(self.shard, self.group)

    def wait(self) -> Tensor:
        """Return all rows."""
        pending = self.start().pending
        return self.shard if pending is None else pending.wait()


class DeferredWgrad(NamedTuple):
    """A deferred weight gradient: the arguments of :meth:`GradAccumulator.accumulate_wgrad`."""

    name: str
    x: Operand
    dy: Operand
    multiply: Callable[..., None]
    last: bool


class GradTarget(Protocol):
    """The tensors to which gradients are added, by the names of their parameters."""

    def claim(self, name: str) -> tuple[Tensor, bool]:
        """Return the tensor for the next contribution, local stored shape and at least fp32.

        Also True if the contribution overwrites it, because its content is left from an earlier step. To be called once
        for each contribution.
        """

    def contributed(self, name: str) -> None:
        """Count a contribution. It may still be queued: :meth:`GradAccumulator.flush` precedes reading the target."""


class _Unbound:
    """The target of an accumulator without gradient buffers."""

    def claim(self, name: str) -> tuple[Tensor, bool]:
        raise RuntimeError(f"the gradient of {name} has no buffer: call bind() before backward")

    def contributed(self, name: str) -> None:
        pass


class GradAccumulator:
    """Adds contributions to the gradient buffers of their parameters, and reports each so that they can be counted.

    A layer's backward returns the result of ``accumulate_wgrad``, ``accumulate_rows`` or ``accumulate`` as the
    parameter's gradient: None here, or the gradient itself in an accumulator for parameters that keep ``grad`` (fully
    sharded ones).
    """

    def __init__(self, multiply: Callable[..., None] = accumulate_wgrad, queue_vectors: bool = False) -> None:
        """Create an accumulator; :meth:`bind` connects it to the buffers.

        Args:
            multiply: the kernel that multiplies the operands of a linear's weight gradient into a buffer.
            queue_vectors: let gradients of norms and biases wait until their bucket is complete. A few kernels then add
                all of them, instead of a launch for each on a GPU.
        """
        self.multiply, self._queue_vectors = multiply, queue_vectors
        self._buffers: GradTarget = _Unbound()
        self._combined: dict[str, None] | None = None  # names with contributions inside one_contribution()
        self._queued_vectors: dict[str, Tensor] = {}  # they wait for flush()
        self._queues: dict[tuple[int, int], list[DeferredWgrad]] = {}
        self._deferred_to: tuple[int, int] | None = None

    def bind(self, buffers: GradTarget) -> None:
        """Accumulate into ``buffers``."""
        self._buffers = buffers

    @classmethod
    def to_grad(cls, params: Mapping[str, nn.Parameter]) -> Self:
        """Return an accumulator that writes to ``Parameter.grad``, for torch's own optimizers and clipping.

        Args:
            params: by name; those of layers that are still to be built may be added.
        """
        accumulator = cls()
        accumulator.bind(ParameterGrads(params))
        return accumulator

    def attach(self, name: str, parameter: nn.Parameter, uses: int = 1) -> None:
        """Accumulate the gradients that plain autograd computes for ``parameter``, such as those of norms.

        Autograd sums those of all uses in a chunk, so its gradient counts as ``uses`` contributions.
        """

        def collect(p: Tensor) -> None:
            grad, p.grad = p.grad, None
            if grad is not None:
                self.accumulate(name, grad)
                for _ in range(uses - 1):
                    self._contributed(name)

        parameter.grad_dtype = torch.promote_types(parameter.dtype, torch.float32)  # gradients are not rounded
        parameter.register_post_accumulate_grad_hook(collect)

    def wgrad_input(self, x: Tensor, group: Group | None) -> WgradOperand:
        """Return a linear's input as an operand of its weight gradient; its gather starts unless W is deferred."""
        rows = WgradOperand(x.detach(), group)  # detached, because a saved input still refers to its graph
        return rows if self._deferred_to else rows.start()

    def accumulate_wgrad(
        self, name: str, x: Operand, dy: Operand, multiply: Callable[..., None] | None = None, last: bool = True
    ) -> Tensor | None:
        """Add ``dy^T x`` to the gradient of a linear's weight, now or, inside :meth:`deferring_wgrad`, in the W action.

        Args:
            name: of the weight.
            x: input of the layer ``[..., in]``.
            dy: gradient of its output ``[..., out]``.
            multiply: called as ``multiply(target, x, dy, beta=)`` instead of :attr:`multiply`.
            last: False for a part of a contribution, of which another follows.
        """
        multiply = multiply or self.multiply
        if self._deferred_to is not None:
            deferred = DeferredWgrad(name, x.ungathered(), dy.ungathered(), multiply, last)
            self._queues.setdefault(self._deferred_to, []).append(deferred)
            return None
        x_rows, dy_rows = x.start().wait(), dy.wait()
        target, first = self._buffers.claim(name)
        multiply(target, x_rows, dy_rows, beta=float(not first))
        if last:
            self._contributed(name)
        return None

    @contextmanager
    def accumulate_products(self, name: str) -> Iterator[Callable[[Tensor, Tensor], None]]:
        """Yield a function of ``(x, dy)`` that adds ``dy^T x`` to a weight's gradient; all calls are one contribution.

        At least one call is needed.
        """
        target, first = self._buffers.claim(name)
        betas = chain((float(not first),), repeat(1.0))
        yield lambda x, dy: self.multiply(target, x, dy, beta=next(betas))
        self._contributed(name)

    def accumulate_rows(self, name: str, rows: Tensor | slice, dy: Tensor) -> Tensor | None:
        """Add ``dy`` ``[n, h]`` to rows of an embedding's gradient, given as indices ``[n]`` or as a range."""
        target, first = self._buffers.claim(name)
        if first:
            target.zero_()
        if isinstance(rows, slice):
            target[rows].add_(dy)
        else:
            target.index_add_(0, rows, dy.to(target.dtype))  # sorts the indices if torch must be deterministic
        self._contributed(name)
        return None

    def accumulate(self, name: str, grad: Tensor) -> Tensor | None:
        """Add ``grad`` (local stored shape) to the gradient of ``name``."""
        if self._queue_vectors and grad.dim() == 1:
            if name in self._queued_vectors:
                self.flush()
            self._queued_vectors[name] = grad
        else:
            target, first = self._buffers.claim(name)
            target.copy_(grad) if first else target.add_(grad)
        self._contributed(name)
        return None

    def flush(self) -> None:
        """Add the queued gradients to their targets, with few kernels."""
        queued, self._queued_vectors = self._queued_vectors, {}
        groups: dict[tuple[bool, torch.dtype], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for name, grad in queued.items():
            target, first = self._buffers.claim(name)
            groups[first, grad.dtype].append((target, grad))
        for (first, dtype), pairs in groups.items():
            targets, grads = map(list, zip(*pairs))
            if first:
                torch._foreach_copy_(targets, grads)
                continue
            if dtype != targets[0].dtype:  # a sum of two dtypes would be a kernel per tensor
                wide = [torch.empty_like(target) for target in targets]
                torch._foreach_copy_(wide, grads)
                grads = wide
            torch._foreach_add_(targets, grads)

    @contextmanager
    def one_contribution(self) -> Iterator[None]:
        """Count all that the body adds to a parameter's gradient as one contribution, and defer nothing."""
        names, deferred_to = dict[str, None](), self._deferred_to
        self._combined, self._deferred_to = names, None
        try:
            yield
        finally:
            self._combined, self._deferred_to = None, deferred_to
        for name in names:
            self._buffers.contributed(name)

    def _contributed(self, name: str) -> None:
        if self._combined is None:
            self._buffers.contributed(name)
        else:
            self._combined[name] = None

    def discard_pending(self) -> None:
        """Discard what an aborted step left in the queues."""
        self._queued_vectors.clear()
        self._queues.clear()

    @contextmanager
    def deferring_wgrad(self, chunk: int, microbatch: int) -> Iterator[None]:
        """Queue the weight gradients of linears for the W action ``(chunk, microbatch)`` while the body runs."""
        self._deferred_to = (chunk, microbatch)
        try:
            yield
        finally:
            self._deferred_to = None

    def run_deferred(self, chunk: int, microbatch: int) -> None:
        """Compute the weight gradients that were deferred to the W action ``(chunk, microbatch)``.

        The operands of the next product are gathered while this one is computed; operands are freed after use.
        """
        queue = self._queues.pop((chunk, microbatch), [])[::-1]
        while queue:
            product = queue.pop()
            for started in (product, *queue[-1:]):
                started.x.start()
                started.dy.start()
            self.accumulate_wgrad(*product)

    @property
    def defers_wgrad(self) -> bool:
        """True inside :meth:`deferring_wgrad`."""
        return self._deferred_to is not None


@dataclass(frozen=True)
class ParameterGrads(GradTarget):
    """The gradients of parameters as the buffers of an accumulator."""

    params: Mapping[str, nn.Parameter]

    def claim(self, name: str) -> tuple[Tensor, bool]:
        """Return ``Parameter.grad``, zero where there is none, and False: contributions are added."""
        parameter = self.params[name]
        if parameter.grad is None:
            parameter.grad_dtype = torch.promote_types(parameter.dtype, torch.float32)
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        return parameter.grad, False

    def contributed(self, name: str) -> None:
        """Count nothing."""
