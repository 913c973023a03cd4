"""What a rank writes or fills: boxes of global tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.parallel.shard import Box


@dataclass(frozen=True)
class Part:
    """A box of a global tensor that this rank writes or fills.

    Attributes:
        box: where it lies in the tensor's view.
        tensor: of shape ``box.size``, with any strides, on any device; or what gives it, called only when it is needed,
            so that tensors which must be computed first exist one after the other. To be filled, it must give the
            same memory every time.
    """

    box: Box
    tensor: Tensor | Callable[[], Tensor]

    def resolve(self) -> Tensor:
        """The tensor itself.

        Raises:
            ValueError: when its shape is not that of the box.
        """
        tensor = self.tensor if isinstance(self.tensor, Tensor) else self.tensor()
        if tuple(tensor.shape) != self.box.size:
            raise ValueError(f"a tensor {list(tensor.shape)} for a box of {list(self.box.size)}")
        return tensor.detach()


@dataclass(frozen=True)
class GlobalTensor:
    """A tensor of the model or optimizer, and this rank's parts of it.

    Attributes:
        shape: as stored, 1-D or 2-D as a rule; knows no layout and no padding.
        view: the same elements, row by row, in the dimensions that boxes refer to; refines ``shape``.
        dtype: as written. What is read may have another one of the same kind.
        parts: of this rank. Those of all ranks together are disjoint and make up the whole when written.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
