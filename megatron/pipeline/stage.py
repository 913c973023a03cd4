"""One pipeline stage at run time: its chunk, and the graph roots kept for the backward of each micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.distributed.micro_batch import MicroBatch

Chunk = Callable[[Tensor | None, MicroBatch], tuple[Tensor, Tensor]]
"""``chunk(x, micro_batch) -> (out, aux)``: ``x`` is None in the first stage, ``out`` the summed loss in the last."""


class _Root(NamedTuple):
    """A node of the autograd graph where backward starts, without the tensor, so that its memory can be freed."""

    edge: GradientEdge
    dtype: torch.dtype


class _Kept(NamedTuple):
    """State of a micro-batch that backward needs; a result without gradient has no root."""

    x: Tensor | None
    out: _Root | None
    aux: _Root | None


class Stage:
    """A chunk, run one micro-batch at a time."""

    def __init__(self, number: int, chunk: Chunk) -> None:
        """Create the stage.

        Args:
            number: among the stages of the pipeline, from 0.
            chunk: the module to run.
        """
        self.number, self.chunk = number, chunk
        self._kept: dict[int, _Kept] = {}

    def forward(self, microbatch: int, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Run the chunk and return its detached output; if gradients are enabled, keep what backward needs.

        Args:
            microbatch: index in the step.
            x: input ``[S(/tp), B, H]``; None in the first stage.
            batch: the micro-batch.
        """
        if x is not None:
            x = x.detach().requires_grad_(torch.is_grad_enabled())
        out, aux = self.chunk(x, batch)
        if torch.is_grad_enabled():
            self._kept[microbatch] = _Kept(x, _root(out), _root(aux))
        return out.detach()

    def backward(self, microbatch: int, dy: Tensor, seed: Tensor) -> Tensor | None:
        """Run backward of a micro-batch and free what was kept for it.

        Args:
            microbatch: index in the step.
            dy: gradient of the output; in the last stage, the seed.
            seed: factor of the auxiliary loss in the global objective, 0-d.

        Returns:
            The gradient of the input; None in the first stage.

        Raises:
            RuntimeError: if the output does not depend on the input.
        """
        x, out, aux = self._kept.pop(microbatch)
        roots = [(root, grad) for root, grad in ((out, dy), (aux, seed)) if root is not None]
        torch.autograd.backward([root.edge for root, _ in roots], [grad.to(root.dtype) for root, grad in roots])
        if x is not None and x.grad is None:
            raise RuntimeError(f"the output of stage {self.number} does not depend on its input")
        return None if x is None else x.grad


def _root(result: Tensor) -> _Root | None:
    return _Root(get_gradient_edge(result), result.dtype) if result.requires_grad else None
