"""Reading tensors block by block, so that a conversion of formats takes the memory of a block and not of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.checkpoint.boxes import cut, relative
from megatron.model.fill import Source
from megatron.parallel.shard import Box

BLOCK_ELEMENTS = 16 << 20
"""Elements read at a time: those of one chunk of a checkpoint in fp32."""


def read_in_blocks(source: Source, name: str, view: tuple[int, ...], box: Box, dtype: torch.dtype) -> Tensor:
    """The elements of ``box`` of a tensor, of shape ``box.size``, in ``dtype`` whatever the source has."""
    out = torch.empty(box.size, dtype=dtype)
    for block in cut(box, BLOCK_ELEMENTS):
        out[relative(block, box).slices] = source.read(name, view, block)
    return out
