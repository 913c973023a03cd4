"""Builds the buckets of a rank, and chooses how each is stored and summed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from megatron.config.parallel import ParallelConfig
from megatron.distributed.comm import Group
from megatron.distributed.mesh import Mesh
from megatron.distributed.param_layout import BucketKey, matrix_blocks, plan_buckets
from megatron.distributed.sharding import ShardSpec
from megatron.optimizer.buckets import Bucket, BucketLayout, BufferPool, FrozenBucket, GradBucket, ShardedBucket
from megatron.optimizer.grad_compression import Int8Reduction, PowerSGD, TopK
from megatron.optimizer.reduction import Reduction, RoundedReduction


def build_buckets(
    specs: Mapping[str, ShardSpec],
    dtypes: Mapping[str, torch.dtype],
    mesh: Mesh,
    flush: Callable[[], None],
    device: torch.device,
    config: ParallelConfig,
    uncut: Collection[str],
    seed: int,
) -> tuple[list[Bucket], list[FrozenBucket]]:
    """Allocate the buckets of trained parameters, and lay those of frozen ones out; see :class:`GradBuffer`."""
    buckets, frozen, pool = list[Bucket](), list[FrozenBucket](), BufferPool()
    keys = {
        name: BucketKey.of(name, spec, str(dtypes[name]), name in uncut, config.zero_stage)
        for name, spec in specs.items()
    }

    def group_sizes(axes: tuple[str, ...]) -> tuple[int, int]:
        return mesh.optimizer_shard_group(*axes).size, mesh.optimizer_replica_group(*axes).size

    for shape in plan_buckets(specs, keys, config.bucket_size(mesh.dp_cp.size), group_sizes):
        in_bucket, axes = {name: specs[name] for name in shape.sizes}, shape.key.axes
        if shape.key.frozen:
            ranks = mesh.weight_gather_group(*axes) if shape.key.block else Group((mesh.rank,))
            frozen.append(FrozenBucket(shape.packing, ranks, in_bucket))
            continue
        shards, copies = mesh.optimizer_shard_group(*axes), mesh.optimizer_replica_group(*axes)
        dtype = torch.promote_types(dtypes[next(iter(in_bucket))], torch.float32)
        layout = BucketLayout(shape.packing, shards, copies, dtype, device)
        reduction = build_reduction(config, layout, in_bucket, seed, len(buckets))
        if config.zero_stage >= 2 and shards.size > 1:
            buckets.append(ShardedBucket(layout, reduction, in_bucket, flush, pool))
        else:
            buckets.append(GradBucket(layout, reduction, in_bucket, flush))
    return buckets, frozen


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
