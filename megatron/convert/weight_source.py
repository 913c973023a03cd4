"""Sources of weights: global tensors by our names, of which any box is read without the rest.

What :func:`megatron.convert.sources.open_source` returns for a location is a `ModelSource`, whatever its format.
`fill_weights` initialises a rank from any source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from megatron.checkpoint.format import relative_box, split_box
from megatron.checkpoint.tensor_file import copy_tiled
from megatron.config.model import ModelConfig
from megatron.convert.tokenizer_files import SmallFiles
from megatron.distributed.param_layout import ParamShard, shard_boxes
from megatron.distributed.sharding import Box, ShardSpec


class WeightSource(Protocol):
    """Global tensors by name, of which any box can be read on its own."""

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the elements of ``box`` of tensor ``name`` viewed as ``view``, of shape ``box.size``, in any dtype."""


class ModelSource(WeightSource, Protocol):
    """All weights of a model, and the small files beside them."""

    model: ModelConfig  # architecture, with the vocabulary size
    specs: Mapping[str, ShardSpec]  # of all weights, by global name
    precision: str  # data type of training, or of the stored weights; a choice of ``--params-dtype``
    notes: Sequence[str]  # for the user, such as which checkpoint was chosen
    config_file: Path | None  # config.json of transformers, where the weights have one

    def small_files(self) -> SmallFiles:
        """Return tokenizer files and generation settings."""


@torch.no_grad()
def fill_weights(
    specs: Mapping[str, ShardSpec],
    tensors: Mapping[str, Tensor],
    source: WeightSource,
    shares: Mapping[str, ParamShard] = MappingProxyType({}),
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
        for slot in shard_boxes(spec, shares.get(name) or ParamShard(0, prod(spec.local_shape))):
            slot.view_in(local).copy_(source.read(name, spec.view, slot.piece.global_box))


BLOCK_ELEMENTS = 16 << 20
"""Elements per block: those of one checkpoint chunk in fp32."""


def fill_in_blocks(source: WeightSource, name: str, view: tuple[int, ...], box: Box, out: Tensor) -> None:
    """Read ``box`` of a tensor into one of shape ``box.size`` and any strides and floating-point type."""
    for block in split_box(box, BLOCK_ELEMENTS):
        copy_tiled(out[relative_box(block, box).slices], source.read(name, view, block))
