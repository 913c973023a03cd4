"""Closed formulas for the data-parallel communication of a step: gradient reduction and weight all-gather."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from megatron.config.batch import get_num_microbatches
from megatron.config.run import RunConfig
from megatron.distributed.layout import Layout
from megatron.planner.memory import DTYPE_BYTES, BucketShape, bucket_shapes, main_param_bytes


def data_parallel_traffic(config: RunConfig, world_size: int, pp_rank: int = 0) -> dict[str, float]:
    """Return the bytes that a rank sends in a step of the full batch, by operation, with ring algorithms.

    For a bucket of B bytes sharded over n ranks, with c copies, and m micro-batches:

    ======  ==========================  =======================  ===================
    stage   reduce-scatter              all-reduce               all-gather
    ======  ==========================  =======================  ===================
    ZeRO-0                              2 B (c - 1) / c
    ZeRO-1  B (n - 1) / n               2 (B / n) (c - 1) / c    W (n - 1) / n
    ZeRO-2  m B (n - 1) / n             2 (B / n) (c - 1) / c    W (n - 1) / n
    ======  ==========================  =======================  ===================

    W is the size of the bucket's weights in bytes. With gradient reduction in bf16, B counts two bytes per element, a
    reduce-scatter is an all-to-all, and an all-reduce is an all-to-all plus an all-gather. ZeRO-2 sends less when the
    schedule delays weight gradients over several micro-batches.

    Raises:
        ValueError: when the vocabulary size is not set.
    """
    layout = Layout.from_config(config.parallel, world_size)
    sent: dict[str, float] = defaultdict(float)
    for bucket in bucket_shapes(config, layout, pp_rank):
        for operation, count in _bucket_traffic(bucket, config, layout.sizes["dp"]):
            sent[operation] += count
    return {operation: count for operation, count in sent.items() if count}


def _bucket_traffic(bucket: BucketShape, config: RunConfig, dp: int) -> Iterator[tuple[str, float]]:
    in_bf16 = config.parallel.grad_reduce_in_bf16
    grad_bytes = DTYPE_BYTES["bf16"] if in_bf16 else main_param_bytes(config)
    weight_bytes = DTYPE_BYTES[config.precision.params_dtype]
    size, shard = bucket.packing.size, bucket.packing.size // bucket.shards
    reductions = get_num_microbatches(config.training, dp) if config.parallel.zero_stage == 2 else 1
    over_shards, over_copies = ((n - 1) / n for n in (bucket.shards, bucket.copies))
    yield "all-to-all" if in_bf16 else "reduce-scatter", reductions * size * grad_bytes * over_shards
    if in_bf16:
        yield "all-to-all", shard * grad_bytes * over_copies
        yield "all-gather", shard * grad_bytes * over_copies
    else:
        yield "all-reduce", 2 * shard * grad_bytes * over_copies
    yield "all-gather", size * weight_bytes * over_shards
