"""Where gradients go: the sink between backward and the contiguous gradient buffers.

A linear's backward hands over ``(x, dy)``; the sink multiplies them into the parameter's main gradient now, or
queues them for a later W action of a pipeline schedule. ``Parameter.grad`` stays None throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from megatron.kernels.weight_gradient import WeightGradient, add_outer
from megatron.parallel import comm
from megatron.parallel.comm import Group, Pending


@dataclass
class Rows:
    """An operand that may still have to be gathered over the sequence-parallel ranks.

    Attributes:
        shard: this rank's rows.
        group: over which to gather them; None when they are whole.
        pending: the gather, once started.
    """

    shard: Tensor
    group: Group | None = None
    pending: Pending | None = None

    def start(self) -> Rows:
        """Start the gather, if there is one."""
        if self.group is not None and self.pending is None:
            self.pending = comm.start_all_gather(self.shard, self.group)
        return self

    def anew(self) -> Rows:
        """The same rows without what was gathered."""
        return Rows(self.shard, self.group)

    def wait(self) -> Tensor:
        """All rows."""
        pending = self.start().pending
        return pending.wait() if pending is not None else self.shard


Product = tuple[str, Rows, Rows, Sequence[int] | None]
"""What :meth:`GradSink.add` is given."""


class GradSink:
    """Accumulates each parameter's gradient into its buffer and counts the contributions.

    What ``add``, ``add_rows`` and ``accumulate`` return is what a layer's backward returns for the parameter: None
    here, and the gradient itself in a sink for parameters that keep their ``grad`` (fully sharded ones).

    Attributes:
        multiply: what multiplies the operands of a linear's gradient into a buffer.
    """

    def __init__(self, multiply: WeightGradient = add_outer) -> None:
        self.multiply = multiply
        self._target: Callable[[str], Tensor] = _unbound
        self._contributed: Callable[[str], None] = lambda name: None
        self._queues: dict[tuple[int, int], list[Product]] = {}
        self._deferred_to: tuple[int, int] | None = None

    def bind(self, target: Callable[[str], Tensor], contributed: Callable[[str], None]) -> None:
        """Give every parameter its gradient buffer.

        Args:
            target: of a parameter's name: where to add its next contribution, local stored shape, at least fp32.
            contributed: called with the name after each contribution.

        """
        self._target, self._contributed = target, contributed

    def attach(self, name: str, parameter: nn.Parameter) -> None:
        """Collect what plain autograd computes for ``parameter`` (norms)."""

        def collect(p: Tensor) -> None:
            grad, p.grad = p.grad, None
            if grad is not None:
                self.accumulate(name, grad)

        parameter.register_post_accumulate_grad_hook(collect)

    def recall(self, x: Tensor, group: Group | None) -> Rows:
        """The input of a linear as its weight gradient needs it; its gather starts unless W is deferred."""
        rows = Rows(x.detach(), group)  # a saved input still hangs on its graph
        return rows if self._deferred_to else rows.start()

    def add(self, name: str, x: Rows, dy: Rows, rows: Sequence[int] | None = None) -> Tensor | None:
        """Add ``dy^T x`` to the gradient of a linear's weight, now or in :meth:`run`, which gathers rows anew.

        Args:
            name: of the weight ``[out, in]``, or of several of them, one above the other.
            x: its input ``[..., in]``.
            dy: gradient of its output ``[..., out]``.
            rows: of several weights, how many rows of the input are those of each, in turn.

        """
        if self._deferred_to is not None:
            self._queues.setdefault(self._deferred_to, []).append((name, x.anew(), dy.anew(), rows))
            return None
        target, x_rows, dy_rows = self._target(name), x.start().wait(), dy.wait()
        if rows is None:
            self.multiply(target, x_rows, dy_rows)
        else:
            for into, one, other in zip(target.chunk(len(rows)), x_rows.split(rows), dy_rows.split(rows), strict=True):
                if len(one):
                    self.multiply(into, one, other)
        self._contributed(name)
        return None

    def add_rows(self, name: str, indices: Tensor, dy: Tensor) -> Tensor | None:
        """Add ``dy`` ``[n, h]`` to the rows ``indices`` ``[n]`` of an embedding's gradient."""
        target = self._target(name)
        if target.is_cuda:  # sorts the indices; index_add_ would add in any order, and so differ from run to run
            target.index_put_((indices,), dy.to(target.dtype), accumulate=True)
        else:
            target.index_add_(0, indices, dy.to(target.dtype))
        self._contributed(name)
        return None

    def accumulate(self, name: str, grad: Tensor, scale: Tensor | float = 1.0) -> Tensor | None:
        """Add ``scale * grad`` (local stored shape) to the gradient of ``name``."""
        target = self._target(name)
        if isinstance(scale, Tensor):
            target.addcmul_(grad.to(target.dtype), scale.to(target.dtype))
        else:
            target.add_(grad, alpha=scale)
        self._contributed(name)
        return None

    @contextmanager
    def deferring(self, chunk: int, microbatch: int) -> Iterator[None]:
        """Queue weight gradients of linears under ``(chunk, microbatch)`` while the body runs backward (I)."""
        self._deferred_to = (chunk, microbatch)
        try:
            yield
        finally:
            self._deferred_to = None

    def run(self, chunk: int, microbatch: int) -> None:
        """Compute what was queued under ``(chunk, microbatch)`` (W).

        Rows of the next gradient are gathered behind the product of this one; what a product has used is let go of.
        """
        queue = self._queues.pop((chunk, microbatch), [])[::-1]
        while queue:
            name, x, dy, rows = queue.pop()
            for operand in (x, dy, *(queue[-1][1:3] if queue else ())):
                operand.start()
            self.add(name, x, dy, rows)

    @property
    def queued(self) -> int:
        """Weight gradients that wait for their W action."""
        return sum(map(len, self._queues.values()))


def _unbound(name: str) -> Tensor:
    raise RuntimeError(f"the gradient of {name} has no buffer: bind the sink first")
