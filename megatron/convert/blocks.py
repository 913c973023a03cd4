"""Reading a tensor block by block, so that a conversion needs the memory of one block only."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.checkpoint.boxes import cut, relative
from megatron.model.fill import Source
from megatron.parallel.shard import Box

BLOCK_ELEMENTS = 16 << 20
"""Elements per block: those of one checkpoint chunk in fp32."""


def read_in_blocks(source: Source, name: str, view: tuple[int, ...], box: Box, dtype: torch.dtype) -> Tensor:
    """Return the elements of ``box`` of a tensor, of shape ``box.size``, converted to ``dtype``."""
    out = torch.empty(box.size, dtype=dtype)
    for block in cut(box, BLOCK_ELEMENTS):
        out[relative(block, box).slices] = source.read(name, view, block)
    return out
