"""Where gradients go: the sink between backward and the contiguous gradient buffers.

A linear's backward hands over ``(x, dy)``; the sink multiplies them into the parameter's main gradient now, or
queues them for a later W action of a pipeline schedule. ``Parameter.grad`` stays None throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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


class GradSink:
    """Accumulates each parameter's gradient into its buffer and counts the contributions.

    What ``add``, ``add_rows`` and ``accumulate`` return is what a layer's backward returns for the parameter: None
    here, and the gradient itself in a sink for parameters that keep their ``grad`` (fully sharded ones).

    Attributes:
        multiply: what multiplies the operands of a linear's gradient into a buffer.
    """

    def __init__(self, multiply: WeightGradient = add_outer) -> None:
        self.multiply = multiply
        self._targets: Mapping[str, Tensor] = {}
        self._contributed: Callable[[str], None] = lambda name: None
        self._queues: dict[tuple[int, int], list[tuple[str, Rows, Rows]]] = {}
        self._deferred_to: tuple[int, int] | None = None

    def bind(self, targets: Mapping[str, Tensor], contributed: Callable[[str], None]) -> None:
        """Give every parameter its gradient buffer.

        Args:
            targets: local stored shape, at least fp32, by parameter name.
            contributed: called with the name after each contribution.

        """
        self._targets, self._contributed = targets, contributed

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

    def add(self, name: str, x: Rows, dy: Rows) -> Tensor | None:
        """Add ``dy^T x`` to the gradient of a linear's weight, now or in :meth:`run`, which gathers rows anew.

        Args:
            name: of the weight ``[out, in]``.
            x: its input ``[..., in]``.
            dy: gradient of its output ``[..., out]``.

        """
        if self._deferred_to is not None:
            self._queues.setdefault(self._deferred_to, []).append((name, x.anew(), dy.anew()))
            return None
        self.multiply(self._targets[name], x.start().wait(), dy.wait())
        self._contributed(name)
        return None

    def add_rows(self, name: str, indices: Tensor, dy: Tensor) -> Tensor | None:
        """Add ``dy`` ``[n, h]`` to the rows ``indices`` ``[n]`` of an embedding's gradient."""
        target = self._targets[name]
        if target.is_cuda:  # sorts the indices; index_add_ would add in any order, and so differ from run to run
            target.index_put_((indices,), dy.to(target.dtype), accumulate=True)
        else:
            target.index_add_(0, indices, dy.to(target.dtype))
        self._contributed(name)
        return None

    def accumulate(self, name: str, grad: Tensor, scale: Tensor | float = 1.0) -> Tensor | None:
        """Add ``scale * grad`` (local stored shape) to the gradient of ``name``."""
        target = self._targets[name]
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
            name, x, dy = queue.pop()
            for rows in (x, dy, *(queue[-1][1:] if queue else ())):
                rows.start()
            self.add(name, x, dy)

    @property
    def queued(self) -> int:
        """Weight gradients that wait for their W action."""
        return sum(map(len, self._queues.values()))
