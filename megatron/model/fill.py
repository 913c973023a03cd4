"""Loading a rank's weights from any source of global tensors."""

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
    """Global tensors by name, of which any box can be read on its own."""

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the elements of ``box`` of tensor ``name`` viewed as ``view``, of shape ``box.size``, in any dtype."""


@torch.no_grad()
def fill(
    specs: Mapping[str, ShardSpec],
    tensors: Mapping[str, Tensor],
    source: Source,
    shares: Mapping[str, Share] = MappingProxyType({}),
) -> None:
    """Read a rank's part of every tensor in place. Elements outside all pieces (vocabulary padding) become 0.

    Args:
        specs: sharding of every tensor, by global name.
        tensors: local tensors of shape ``spec.local_shape``, or the shards of them given by ``shares``. Values are
            converted to their dtype.
        source: global tensors.
        shares: element range of each sharded local tensor, by name; tensors without one are complete.
    """
    for name, tensor in tensors.items():
        spec, local = specs[name], tensor.detach().zero_()
        for slot in slots(spec, shares.get(name) or Share(0, prod(spec.local_shape))):
            slot.of(local).copy_(source.read(name, spec.view, slot.piece.place))
