"""What data-parallel ranks send each other in a step, in closed form: gradients there, and weights back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from megatron.config.batch import microbatches
from megatron.config.memory import BYTES, Bucket, buckets, master_bytes
from megatron.config.run import RunConfig
from megatron.parallel.layout import Layout


def replica_traffic(config: RunConfig, world_size: int, pp_rank: int = 0) -> dict[str, float]:
    """Bytes that a rank sends in a step of the full batch, by operation, as a ring does it.

    Of a bucket of B bytes that n ranks cut among themselves, c copies of it, and m micro-batches:

    ======  ==========================  =======================  ===================
    stage   reduce-scatter              all-reduce               all-gather
    ======  ==========================  =======================  ===================
    ZeRO-0                              2 B (c - 1) / c
    ZeRO-1  B (n - 1) / n               2 (B / n) (c - 1) / c    W (n - 1) / n
    ZeRO-2  m B (n - 1) / n             2 (B / n) (c - 1) / c    W (n - 1) / n
    ======  ==========================  =======================  ===================

    W are the bytes of its weights. Where gradients travel as bf16, B counts two bytes for each, a reduce-scatter is an
    all-to-all, and an all-reduce is that and an all-gather. ZeRO-2 sends less where a schedule puts off gradients
    until there are those of several micro-batches.

    Raises:
        ValueError: while the vocabulary's size is not known.
    """
    layout = Layout.from_config(config.parallel, world_size)
    found: dict[str, float] = defaultdict(float)
    for bucket in buckets(config, layout, pp_rank):
        for operation, count in _of_bucket(bucket, config, layout.sizes["dp"]):
            found[operation] += count
    return {operation: count for operation, count in found.items() if count}


def _of_bucket(bucket: Bucket, config: RunConfig, dp: int) -> Iterator[tuple[str, float]]:
    parallel, weight = config.parallel, BYTES[config.precision.params_dtype]
    rounded = parallel.grad_reduce_in_bf16
    wire = BYTES["bf16"] if rounded else master_bytes(config)
    size, part = bucket.packing.size, bucket.packing.size // bucket.shards
    times = microbatches(config.training, dp) if parallel.zero_stage == 2 else 1
    cut, copied = ((n - 1) / n for n in (bucket.shards, bucket.copies))
    yield "all-to-all" if rounded else "reduce-scatter", times * size * wire * cut
    if rounded:
        yield "all-to-all", part * wire * copied
        yield "all-gather", part * wire * copied
    else:
        yield "all-reduce", 2 * part * wire * copied
    yield "all-gather", size * weight * cut
