"""Filling a rank's weights from wherever global tensors can be read box by box."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from megatron.parallel.shard import Box, ShardSpec


class Source(Protocol):
    """Global tensors by name, of which any box can be read without the rest."""

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """The elements of ``box`` of the tensor ``name`` seen as ``view``: of shape ``box.size``, in any dtype."""


@torch.no_grad()
def fill(specs: Mapping[str, ShardSpec], tensors: Mapping[str, Tensor], source: Source) -> None:
    """Read this rank's pieces of every tensor into it; what is in no piece (padding of the vocabulary) becomes 0.

    Args:
        specs: place of every tensor, by global name.
        tensors: local tensors ``spec.local_shape``, filled in place and in their own dtype.
        source: of the global ones.
    """
    for name, tensor in tensors.items():
        spec = specs[name]
        local = tensor.detach().zero_().view(spec.local_view)
        for piece in spec.pieces:
            local[piece.local.slices].copy_(source.read(name, spec.view, piece.place))
