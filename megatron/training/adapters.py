"""The start of a run with adapters."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron.layers.adapters import adapted_row_norms
from megatron.model.gpt import GPTChunk
from megatron.optimizer.distributed_optimizer import DistributedOptimizer
from megatron.optimizer.grad_buffer import GradBuffer


@torch.no_grad()
def initialize_magnitudes(chunks: Mapping[int, GPTChunk], optimizer: DistributedOptimizer, buckets: GradBuffer) -> None:
    """Set DoRA's magnitudes to the norms of the rows of the adapted weights; collective."""
    shards = buckets.shards
    for block in (block for chunk in chunks.values() for block in chunk.layers.values()):
        with optimizer.weights.gathered([block]):
            norms = adapted_row_norms(block)
        held = {name: norms[name][shards[name].start : shards[name].stop] for name in norms if name in shards}
        optimizer.main_params.set(held)
    optimizer.after_load()
    if optimizer.outer is not None:
        optimizer.outer.reset()
