"""The tensors of a checkpoint, and the boxes of them that a rank writes or reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.parallel.shard import Box


@dataclass(frozen=True)
class Part:
    """A box of a global tensor that this rank writes or fills."""

    box: Box  # position in the tensor's view
    # Shape ``box.size``, any strides and device; or a function that computes it, called only when it is needed so that
    # computed tensors need not exist all at once. When loading, the function must return the same memory every time.
    tensor: Tensor | Callable[[], Tensor]

    def resolve(self) -> Tensor:
        """Return the tensor, computed if necessary.

        Raises:
            ValueError: if its shape is not that of the box.
        """
        tensor = self.tensor if isinstance(self.tensor, Tensor) else self.tensor()
        if tuple(tensor.shape) != self.box.size:
            raise ValueError(f"a tensor {list(tensor.shape)} for a box of {list(self.box.size)}")
        return tensor.detach()


@dataclass(frozen=True)
class GlobalTensor:
    """A tensor of the model or optimizer, and this rank's parts of it."""

    shape: tuple[int, ...]  # as stored, usually 1-D or 2-D; independent of layout and padding
    # the same elements in row-major order, in the dimensions that boxes refer to; refines ``shape``
    view: tuple[int, ...]
    dtype: torch.dtype  # as written; when loading, floating-point types may differ
    parts: tuple[Part, ...]  # of this rank; when writing, the parts of all ranks partition the tensor
