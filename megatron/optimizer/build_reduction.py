"""Chooses the reduction of a gradient bucket."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron.config.parallel import ParallelConfig
from megatron.distributed.param_layout import matrix_blocks
from megatron.distributed.sharding import ShardSpec
from megatron.optimizer.buckets import BucketLayout
from megatron.optimizer.grad_compression import Int8Reduction, PowerSGD, TopK
from megatron.optimizer.reduction import Reduction, RoundedReduction


def build_reduction(
    config: ParallelConfig,
    layout: BucketLayout,
    specs: Mapping[str, ShardSpec],
    *identity: object,
) -> Reduction:
    """Create the reduction of a bucket.

    Args:
        config: communication dtype and compression.
        layout: of the bucket.
        specs: of its parameters.
        identity: keys random numbers: seed of the run and number of the bucket.
    """
    compression, shards, copies = config.compression, layout.shards, layout.copies
    if config.grad_reduce_in_bf16:
        return RoundedReduction(shards, copies, torch.bfloat16)
    if compression is None or (compression.has_errors and copies.size == 1):
        return Reduction(shards, copies)
    if not compression.has_errors:
        return Int8Reduction(shards, copies, *identity)
    blocks = matrix_blocks(layout.packing, specs, shards.rank, shards.size, compression.rank)
    part = torch.empty(layout.packing.size // shards.size, dtype=layout.dtype, device=layout.device)
    if compression.method == "topk":
        return TopK(shards, copies, blocks, part, compression)
    return PowerSGD(shards, copies, blocks, part, compression, *identity)
