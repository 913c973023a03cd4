"""Filling a rank's weights from wherever global tensors can be read box by box."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from megatron.parallel.ownership import Share, slots
from megatron.parallel.shard import Box, ShardSpec


class Source(Protocol):
    """Global tensors by name, of which any box can be read without the rest."""

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """The elements of ``box`` of the tensor ``name`` seen as ``view``: of shape ``box.size``, in any dtype."""


@torch.no_grad()
def fill(
    specs: Mapping[str, ShardSpec],
    tensors: Mapping[str, Tensor],
    source: Source,
    shares: Mapping[str, Share] = MappingProxyType({}),
) -> None:
    """Read a rank's part of every tensor into it; what is in no piece (padding of the vocabulary) becomes 0.

    Args:
        specs: place of every tensor, by global name.
        tensors: local tensors ``spec.local_shape``, or the shares of them, filled in place and in their own dtype.
        source: of the global ones.
        shares: of the local tensors, by name; where there is none, the tensor is whole.
    """
    for name, tensor in tensors.items():
        spec, local = specs[name], tensor.detach().zero_()
        for slot in slots(spec, shares.get(name) or Share(0, prod(spec.local_shape))):
            slot.of(local).copy_(source.read(name, spec.view, slot.piece.place))
