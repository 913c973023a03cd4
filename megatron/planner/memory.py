"""Memory and data-parallel communication of a rank in bytes, computed from the configuration without torch.

The parameters are those that the layers declare (:mod:`megatron.layers.parameters`), in the buckets that a run lays
them out in (:func:`megatron.distributed.param_layout.plan_buckets`), so alignment and uneven shards are counted
exactly. Left out are scalars (a few bytes each). :func:`peaks_by_rank` adds what exists only within a step:
activations (:mod:`megatron.planner.activations`), gradients that are being reduced, and buffers of NCCL.

All functions raise ``ValueError`` when the vocabulary size is not set, ``ScheduleError`` when the pipeline cannot
distribute the layers, and ``UserError`` when the number of ranks does not fit the layout.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil, prod

from megatron.config.batch import get_num_microbatches
from megatron.config.model import ModelConfig
from megatron.config.parallel import GradCompression, ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.layout import AXES_IN_USE, REDUCTION_GROUPS, Layout, grid_of
from megatron.distributed.param_layout import ALIGNMENT, MAX_REDUCTIONS_IN_FLIGHT, BucketShape, block_of
from megatron.distributed.sharding import EXPERT_REDUCE_AXES, Sharding
from megatron.layers.adapter_parameters import is_adaptable, is_linear
from megatron.layers.mixers.activations import DTYPE_BYTES
from megatron.layers.multi_token_parameters import head_names
from megatron.layers.parameters import block_of_any_kind, gpt, in_checkpoints
from megatron.layers.recompute_plan import RecomputePlan
from megatron.optimizer.param_groups import rule_of
from megatron.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT
from megatron.pipeline.communication import channels
from megatron.pipeline.partition import StageLayers
from megatron.pipeline.plan import build_schedule, resolve_pipeline, stage_layers, stage_placement, virtual_stages
from megatron.planner.activations import decisive_actions, peak_activations, peak_host_activations
from megatron.planner.rank_state import (
    WEIGHT_BYTES,
    RankState,
    alike_ranks,
    bucket_shapes,
    compressed_blocks,
    feature_copies,
    main_param_bytes,
    moments_of,
    place_of,
    rank_parameters,
    shards_of,
    stages_by_rank,
)

OF_FEATURES = tuple(feature_copies(RunConfig()))
STATE_KINDS = ("weights", "gradients", "main params", "moments", *OF_FEATURES, "compression", "buffers")
"""Kinds of persistent state. Masters are the main params, average is the EMA, outer DiLoCo's outer weights and
momentum, compression the errors of compressed gradients and PowerSGD's factors. Buffers are rotary frequencies, those
that options declare, and global row indices of parameters with low-precision state."""


def max_state_bytes(config: RunConfig, world_size: int) -> dict[str, int]:
    """Return the bytes on the rank with the most, by :data:`STATE_KINDS`.

    fp32 and fp64 weights have no separate main params.
    """
    return max(_state_by_stage(config, world_size), key=lambda state: sum(state.values()))


def _by_kind(config: RunConfig, found: Counter[str]) -> dict[str, int]:
    """Return the bytes of all kinds of state; features and plugins have kinds of their own."""
    return {kind: found[kind] for kind in dict.fromkeys((*STATE_KINDS, *feature_copies(config)))}


def _state_by_stage(config: RunConfig, world_size: int, host: bool = False) -> list[dict[str, int]]:
    """Return the bytes on the fullest rank of every pipeline rank, on its device or on the ``host``."""
    training = TrainingConfig(seq_length=config.training.seq_length)
    states = _fullest_states(replace(config, training=training), world_size, host)
    return [_by_kind(config, state) for state in states]


@lru_cache(maxsize=256)
def _fullest_states(config: RunConfig, world_size: int, host: bool) -> list[Counter[str]]:
    """Return the bytes on the fullest rank of every pipeline rank, which do not depend on the batch."""
    layout, alike = Layout.from_config(config.parallel, world_size), alike_ranks(config)
    states = {pp: RankState.of(config, layout, pp).fullest(host) for pp in {*alike}}
    return [states[pp] for pp in alike]


def max_peak_bytes(config: RunConfig, world_size: int) -> dict[str, int]:
    """Return the bytes at the peak of a step on the rank with the most, by part (:func:`peaks_by_rank`)."""
    return max(peaks_by_rank(config, world_size), key=lambda peak: sum(peak.values()))


def peaks_by_rank(config: RunConfig, world_size: int) -> list[dict[str, int]]:
    """Return the bytes at the peak of a step on the fullest rank of every pipeline rank.

    By :data:`STATE_KINDS`, ``gathered weights`` (:func:`gathered_weight_bytes`), ``reduction``
    (:func:`reduction_buffer_bytes`), the parts of :func:`megatron.planner.activations.peak_activations`,
    ``FP8 weights`` (:func:`fp8_weight_bytes`), ``converted weights`` (of DoRA and quantised weights), and an estimate
    for NCCL (:func:`communicator_bytes`).
    """
    layout, alike = Layout.from_config(config.parallel, world_size), alike_ranks(config)
    activations = peak_activations(config, layout.sizes["dp"])
    during = {
        pp: {
            "gathered weights": gathered_weight_bytes(config, layout, pp),
            "reduction": _reduction_buffers(config, layout, pp),
            "FP8 weights": _fp8_weights(config, pp),
            "converted weights": _converted_weights(config, pp),
        }
        for pp in {*alike}
    }
    nccl = ({"NCCL estimate": _communicator_bytes(config, world_size, pp)} for pp in range(layout.sizes["pp"]))
    parts = zip(_state_by_stage(config, world_size), map(during.__getitem__, alike), activations, nccl)
    return [state | of_step | kept | buffers for state, of_step, kept, buffers in parts]


def rank_state_bytes(config: RunConfig, world_size: int, rank: int) -> dict[str, int]:
    """Return the bytes on one rank, by :data:`STATE_KINDS`."""
    layout = Layout.from_config(config.parallel, world_size)
    pp, dense, expert = place_of(config.parallel, layout, rank)
    return _by_kind(config, RankState.of(config, layout, pp).at(dense, expert)[0])


def machine_state_bytes(
    config: RunConfig, world_size: int, ranks: range
) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Return the bytes of some ranks, each on its device and on the host, by :data:`STATE_KINDS`."""
    layout = Layout.from_config(config.parallel, world_size)
    places = Counter(place_of(config.parallel, layout, rank) for rank in ranks)
    stages = {pp: RankState.of(config, layout, pp) for pp in {pp for pp, _, _ in places}}
    found = {place: stages[place[0]].at(*place[1:]) for place in places}
    states = {place: (_by_kind(config, device), _by_kind(config, host)) for place, (device, host) in found.items()}
    return [states[place] for place, count in places.items() for _ in range(count)]


def rank_host_bytes(config: RunConfig, world_size: int, rank: int) -> dict[str, int]:
    """Return the bytes that one rank offloads to the host.

    By :data:`STATE_KINDS`, of which ``weights`` and ``gradients`` are buffers for copies, and ``activations``.
    """
    layout = Layout.from_config(config.parallel, world_size)
    pp, dense, expert = place_of(config.parallel, layout, rank)
    activations = peak_host_activations(config, layout.sizes["dp"])[pp]
    state = RankState.of(config, layout, pp).at(dense, expert)[1]
    return _by_kind(config, state) | {"activations": activations}


def max_host_bytes(config: RunConfig, world_size: int) -> dict[str, int]:
    """Return the bytes offloaded to the host on the rank with the most; see :func:`rank_host_bytes`."""
    if not (config.optimizer.optimizer_cpu_offload or config.training.cpu_offloading_num_layers):
        return dict.fromkeys((*STATE_KINDS, "activations"), 0)
    activations = peak_host_activations(config, Layout.from_config(config.parallel, world_size).sizes["dp"])
    states = _state_by_stage(config, world_size, host=True)
    found = [state | {"activations": kept} for state, kept in zip(states, activations)]
    return max(found, key=lambda parts: sum(parts.values()))


def checkpoint_bytes(config: RunConfig, world_size: int = 1) -> int:
    """Return the bytes of a checkpoint's tensors; they depend on the layout by the state of compressed gradients only.

    PowerSGD's factors of rows that only pad the vocabulary are counted, though they are not saved.
    """
    weights = main_param_bytes(config) * (1 + sum(feature_copies(config).values()))
    whole = in_checkpoints(gpt(config.model)).items()
    size = 0
    for name, spec in whole:
        moments = moments_of(rule_of(name, spec, config.optimizer), config)[0] if spec.has_gradient else 0
        size += spec.numel * (weights + moments)
    compression, parallel = config.parallel.compression, config.parallel
    if compression is None or not compression.has_errors:
        return size
    layout, wide = Layout.from_config(parallel, world_size), main_param_bytes(config)
    for spec in dict(whole).values():
        copies = shards_of(parallel, layout, spec.expert)[1]
        stages = min(2, layout.sizes["pp"]) if spec.tied else 1
        size += spec.numel * wide * (copies * stages if copies > 1 else 0)
    for pp in range(layout.sizes["pp"]):
        specs = rank_parameters(config, pp)
        for bucket in bucket_shapes(config, layout, pp):
            expert = bucket.key.axes == EXPERT_REDUCE_AXES
            ranks = layout.sizes["ep"] * layout.sizes["etp"] if expert else layout.sizes["tp"]
            for shard in range(bucket.shards if bucket.copies > 1 else 0):
                columns = sum(b.count * b.columns for b in compressed_blocks(bucket, specs, compression, shard))
                size += columns * compression.rank * wide * ranks
    return size


def max_rank_parameters(config: RunConfig) -> int:
    """Return the parameter elements on the rank with the most, with vocabulary padding.

    A tied weight counts on the ranks of the first and of the last stage.
    """
    ranks = (rank_parameters(config, pp) for pp in range(config.parallel.pipeline_model_parallel_size))
    return max(sum(prod((spec.dense or spec).local_shape) for spec in specs.values()) for specs in ranks)


def gathered_weight_bytes(config: RunConfig, layout: Layout, pp_rank: int) -> int:
    """Return the most bytes of whole weights that ZeRO-3 has at a time on a pipeline rank, beside the rank's part.

    With resharding these are a block and the prefetched ones, and what is kept for the backward that follows
    (:mod:`megatron.optimizer.sharded_parameter_store`). Otherwise all weights are whole at the end of forward. Buckets
    that one rank holds alone are not gathered.
    """
    parallel = config.parallel
    if parallel.zero_stage < 3:
        return 0
    buckets = _buckets_by_block(config, layout, pp_rank)

    def whole(blocks: Iterable[str]) -> int:
        """Return the bytes of these blocks, of which two may share a tied weight."""
        shared = {number: bucket for block in blocks for number, bucket in buckets[block].items()}
        gathered = (bucket for bucket in shared.values() if bucket.shards > 1)
        return sum(bucket.packing.size * WEIGHT_BYTES[bucket.key.dtype] for bucket in gathered)

    if not parallel.reshards_after_forward:
        return whole(buckets)
    count, peaks, in_flight = parallel.param_gather_prefetch, [set[str]()], set[str]()
    # Blocks that are recomputed, and so kept, together.
    group = RecomputePlan.from_config(config.training, 1).group or 1
    for stage in stages_by_rank(config)[pp_rank]:
        blocks = stage_blocks(stage, config.model)
        kept = kept_for_backward(blocks, count)
        in_flight |= kept
        for index, block in enumerate(blocks):
            peaks.append({block} | prefetched(blocks[index + 1 :], count) | kept & {*blocks[:index]})
            first = index - (index - stage.first) % group if index - stage.first < stage.count else index
            backward = {*blocks[first : index + 1]} | prefetched(blocks[:index][::-1], count)
            peaks.append(backward - {"embedding"})  # whose backward does not read its weights
    pipelined = in_flight if parallel.pipeline_model_parallel_size > 1 else set()
    return max(whole(blocks | pipelined) for blocks in peaks)


def _buckets_by_block(config: RunConfig, layout: Layout, pp_rank: int) -> dict[str, dict[int, BucketShape]]:
    """Return the buckets of ZeRO-3 by block and number; a tied weight is that of two blocks."""
    found: dict[str, dict[int, BucketShape]] = defaultdict(dict)
    is_tied = not config.model.untie_embeddings_and_output_weights
    for number, bucket in enumerate(bucket_shapes(config, layout, pp_rank)):
        for block in {bucket.key.block, "output_layer" if bucket.key.tied and is_tied else bucket.key.block}:
            found[block][number] = bucket
    return found


def stage_blocks(stage: StageLayers, model: ModelConfig) -> list[str]:
    """Return the names of the blocks of a stage, in the order of forward; heads use the embedding, too."""
    layers, heads = [f"layers.{layer}" for layer in stage.layers], head_names(model)
    last = ["final_layernorm", *["embedding", *heads] * bool(heads), "output_layer"]
    return ["embedding"] * stage.first + layers + last * stage.last


def prefetched(blocks: Sequence[str], count: int) -> set[str]:
    """Return those of the next blocks that ZeRO-3 gathers while another one computes; norms do not count."""
    found = set[str]()
    for block in blocks:
        if block != "final_layernorm":
            if count == 0:
                break
            count -= 1
        found.add(block)
    return found


def kept_for_backward(blocks: Sequence[str], count: int) -> set[str]:
    """Return the blocks of a stage whose weights ZeRO-3 keeps from forward to backward."""
    return {blocks[-1]} | prefetched(blocks[:-1][::-1], count) - {"embedding"}


def layer_of(name: str, model: ModelConfig) -> int | None:
    """Return the layer that a parameter belongs to, or whose kind of block it is part of; None for others."""
    block, _, number = block_of(name).rpartition(".")
    layers = {"layers": range(model.num_layers), "mtp.layers": model.head_layers}
    return layers[block][int(number)] if block in layers else None


def fp8_weight_bytes(config: RunConfig) -> int:
    """Return the bytes of quantised weights on the rank with the most: they are kept in both layouts within a step.

    ZeRO-3 with resharding quantises a weight at every use, and keeps none.
    """
    return max(_fp8_weights(config, pp) for pp in range(config.parallel.pipeline_model_parallel_size))


def _fp8_weights(config: RunConfig, pp: int) -> int:
    model, precision = config.model, config.precision
    if precision.fp8_format is None:
        return 0
    blocks = [(layer_of(name, model), name, spec) for name, spec in rank_parameters(config, pp).items()]
    sizes = [
        prod(spec.local_shape)
        for layer, name, spec in blocks
        if layer is not None and is_linear(name) and precision.layer_in_fp8(layer, model.num_layers)
    ]
    return max(sizes, default=0) if config.parallel.reshards_after_forward else 2 * sum(sizes)


CONVERTING_BYTES = 10
"""Bytes per element of a quantised weight that is converted for a product."""


def _converted_weights(config: RunConfig, pp: int) -> int:
    """Return the bytes of the largest weight that is converted, for a product or DoRA's norms, and of W's row norms.

    DoRA's norms need W in at least fp32.
    """
    model, wide, each = config.model, main_param_bytes(config), 0
    if model.lora_rank is None or not (model.lora_dora or model.frozen_weights_precision):
        return 0
    if model.frozen_weights_precision:
        each = CONVERTING_BYTES
    elif wide > DTYPE_BYTES[config.precision.params_dtype]:
        each = wide
    rows = sum(prod(spec.local_shape) for spec in rank_parameters(config, pp).values() if spec.wide)
    of_block = block_of_any_kind(model.base, Sharding.of_first_rank(config.parallel))
    return each * max(prod(spec.local_shape) for n, spec in of_block.items() if is_adaptable(n, spec)) + rows * wide


def reduction_buffer_bytes(config: RunConfig, world_size: int) -> int:
    """Return an upper bound for the bytes of gradient reduction in flight on the rank with the most.

    On GPUs a reduce-scatter writes into the rank's own shard (gloo, on CPUs, needs a second buffer of that size). A
    reduction in bf16 or int8 needs a send and a receive buffer of the bucket's size, for every concurrent reduction.
    Error feedback keeps the next errors of all buckets until the update is known to be taken. In ZeRO-2
    a full bucket exists only from the first gradient of a micro-batch until its reduction; buckets of equal size reuse
    buffers.
    """
    layout = Layout.from_config(config.parallel, world_size)
    return max(_reduction_buffers(config, layout, pp) for pp in range(layout.sizes["pp"]))


QUANTIZING_BYTES = 20
"""Bytes per element of what quantising a bucket to int8 needs besides the message: fp32 values and random bits."""


def _message_bytes(compression: GradCompression, elements: int, wide: int) -> int:
    """Return the bytes of indices and values that a rank sends of so many elements of matrices; 0 without topk."""
    return compression.kept(elements) * (4 + wide)


def _reduction_buffers(config: RunConfig, layout: Layout, pp: int) -> int:
    wide = main_param_bytes(config)
    compression = config.parallel.compression
    copied = 2 * DTYPE_BYTES["bf16"] if config.parallel.grad_reduce_in_bf16 else 0.0
    if config.parallel.grad_compression == "int8":
        copied = 2 * INT8_BYTES
    trained = (bucket for bucket in bucket_shapes(config, layout, pp) if bucket.key.has_gradients)
    reduced = [bucket for bucket in trained if bucket.shards * bucket.copies > 1]
    streamed = [bucket for bucket in reduced if config.parallel.zero_stage >= 2 and bucket.shards > 1]
    others = [bucket for bucket in reduced if config.parallel.zero_stage < 2 or bucket.shards == 1]
    total = 0
    for buckets in (streamed, others):
        sizes = sorted(bucket.packing.size for bucket in buckets)
        total += ceil(sum(sizes[-MAX_REDUCTIONS_IN_FLIGHT - 1 :]) * copied)
    if compression is not None and reduced:
        parts = [bucket.packing.size // bucket.shards for bucket in reduced]
        if compression.has_errors:
            gathered = sum(
                bucket.copies * _message_bytes(compression, part, wide) for bucket, part in zip(reduced, parts)
            )
            total += (sum(parts) + 2 * max(parts)) * wide + gathered
        else:
            total += max(bucket.packing.size for bucket in reduced) * QUANTIZING_BYTES
    # In layer order, only one bucket per key collects gradients at a time.
    in_layer_order = _finishes_in_layer_order(config, layout, pp)
    if in_layer_order and config.parallel.zero_stage == 3:
        order = {name: place for place, name in enumerate(rank_parameters(config, pp))}
        # A bucket is complete with the gradient of its first parameter in forward.
        completed = sorted(streamed, key=lambda bucket: -min(map(order.__getitem__, bucket.sizes)))
        several = get_num_microbatches(config.training, layout.sizes["dp"]) > 1
        return total + _buffers_by_block(completed, several) * wide
    for size in {bucket.packing.size for bucket in streamed}:
        keys = [bucket.key for bucket in streamed if bucket.packing.size == size]
        total += size * (len(set(keys) if in_layer_order else keys) + MAX_REDUCTIONS_IN_FLIGHT) * wide
    return total


def _buffers_by_block(buckets: Sequence[BucketShape], several: bool) -> int:
    """Return the elements of the buffers in a pool that the buckets of one block after the other use.

    When a block collects gradients, the last buckets before it are in flight, with ``several`` micro-batches those of
    the previous one included. Buffers are used again for buckets of the same size only.
    """
    # A tied weight collects from the loss on, while its gradient of the previous micro-batch is in flight.
    tied = (1 + several) * sum(bucket.packing.size for bucket in buckets if bucket.key.tied)
    blocks: dict[str, list[int]] = defaultdict(list)  # sizes of buckets
    for bucket in buckets:
        if not bucket.key.tied:
            blocks[bucket.key.block].append(bucket.packing.size)
    before = [size for sizes in blocks.values() for size in sizes] * several
    most = Counter[int]()
    for sizes in blocks.values():
        most |= Counter(before[-MAX_REDUCTIONS_IN_FLIGHT:]) + Counter(sizes)
        before += sizes
    return tied + sum(size * count for size, count in most.items())


NCCL_CHANNELS = 16
"""Channels of a communicator: NCCL takes 16 to 32 on nodes with NVLink."""

RECEIVE_BYTES, SEND_BYTES = 10 * 2**20, 2 * 2**20
"""Bytes of NCCL's buffers of a connection, per channel: 4 MiB of ``NCCL_BUFFSIZE`` and those of two other protocols on
the receiving side (allocations on H100s, NVIDIA/nccl#1685)."""


def communicators(config: RunConfig, world_size: int, pp_rank: int) -> tuple[int, int, int]:
    """Return the number of communicators of the first rank of a pipeline stage, as :class:`Mesh` creates them.

    Returns:
        Those of groups with torch.distributed's own, of channels that receive, and of channels that send.
    """
    parallel = config.parallel
    placement = stage_placement(parallel, virtual_stages(config.model, parallel))
    edges, ends = channels(placement), sorted({placement[0], placement[-1]})
    groups = _groups(parallel, world_size, config.model.kv_groups, ends[-1] - ends[0] if pp_rank in ends else 0)
    received, sent = (sum(edge[end] == pp_rank for edge in edges) for end in (1, 0))
    return 1 + groups, received, sent


Ranks = tuple[tuple[int, int], ...]
"""Ranks of a group that start with this one: (size, stride) of each dimension, the strides ascending."""


def _ranks(*dims: tuple[int, int]) -> Ranks:
    """Return equal ranks for equal groups: without dimensions of one rank, and those of one stride merged."""
    found: list[tuple[int, int]] = []
    for size, stride in dims:
        if found and prod(found[-1]) == stride:
            found[-1] = found[-1][0] * size, found[-1][1]
        elif size > 1:
            found.append((size, stride))
    return tuple(found)


@lru_cache(maxsize=256)
def _groups(parallel: ParallelConfig, world_size: int, kv_groups: int, from_first_to_last: int) -> int:
    """Return the number of communicators of groups.

    Args:
        parallel: of the run.
        world_size: ranks.
        kv_groups: of the model.
        from_first_to_last: number of pipeline ranks from that of the first stage to that of the last one; 0 for ranks
            of other stages, and if it is the same.
    """
    layout = Layout.from_config(parallel, world_size)

    def dims(*axes: str) -> Iterator[tuple[int, int]]:
        """Yield the dimensions of a group along some axes."""
        stride = 1
        for axis in reversed(grid_of(axes)):
            if axis in axes:
                yield layout.sizes[axis], stride
            stride *= layout.sizes[axis]

    found = {_ranks(*dims(*axes)) for axes in AXES_IN_USE}
    found.add(_ranks((max(1, layout.sizes["tp"] // kv_groups), 1)))
    if from_first_to_last:
        found.add(_ranks((2, from_first_to_last * world_size // layout.sizes["pp"])))
    ((size, stride),), among = dims("cp"), parallel.cp_head_ranks
    found.add(_ranks((among, stride)))
    rings, gathers = {_ranks((size // among, stride * among))}, set[Ranks]()
    for axes in REDUCTION_GROUPS:
        (_, stride), *_ = dims(*axes)
        size = prod(layout.sizes[axis] for axis in axes)
        of_state = size // (parallel.optimizer_instances or size)
        found |= {_ranks((of_state, stride)), _ranks((size // of_state, stride * of_state))}
        if parallel.gathers_during_compute:
            gathers.add(_ranks((of_state, stride)))
    return sum(len(ranks) > 0 for of_use in (found, rings, gathers) for ranks in of_use)


def communicator_bytes(config: RunConfig, world_size: int) -> int:
    """Return an estimate of the bytes of NCCL's buffers on the rank with the most; 0 without NCCL.

    A group is counted as a ring: a rank receives from one neighbour and sends to another. Left out are NVLS, and the
    further connections of an all-to-all.
    """
    ranks = range(config.parallel.pipeline_model_parallel_size)
    return max(_communicator_bytes(config, world_size, pp) for pp in ranks)


def _communicator_bytes(config: RunConfig, world_size: int, pp_rank: int) -> int:
    if world_size == 1 or config.training.device == "cpu" or config.parallel.distributed_backend == "gloo":
        return 0
    groups, received, sent = communicators(config, world_size, pp_rank)
    return NCCL_CHANNELS * ((groups + received) * RECEIVE_BYTES + (groups + sent) * SEND_BYTES)


def _finishes_in_layer_order(config: RunConfig, layout: Layout, pp: int) -> bool:
    """Return True if gradients arrive layer by layer: one stage per rank, and no delayed weight gradients."""
    if len(stages_by_rank(config)[pp]) > 1:
        return False
    return all(held.action.kind != WEIGHT for held in decisive_actions(config, layout.sizes["dp"])[pp])


def weight_gathers(config: RunConfig, layout: Layout, pp_rank: int) -> Counter[int]:
    """Return how many times a step of ZeRO-3 with resharding gathers each bucket, by its number.

    A block is gathered for forward and for backward, the embedding for forward only. What a stage ends with is kept
    from forward to backward (:func:`kept_for_backward`).
    """
    model, parallel, found, held = config.model, config.parallel, Counter[int](), set[int]()
    of_block = _buckets_by_block(config, layout, pp_rank)
    stages = [stage_blocks(stage, model) for stage in stage_layers(model, parallel, config.training.seq_length)]
    count = get_num_microbatches(config.training, layout.sizes["dp"])
    schedule = build_schedule(resolve_pipeline(model, parallel), count)
    for action in schedule.only((FORWARD, BACKWARD, INPUT)).ranks[pp_rank]:
        blocks, forward = stages[action.stage], action.kind == FORWARD
        kept = kept_for_backward(blocks, parallel.param_gather_prefetch) if forward else set[str]()
        for block in blocks if forward else reversed(blocks):
            if forward or block != "embedding":
                found.update(number for number in of_block[block] if number not in held)
                held = held | {*of_block[block]} if block in kept else held - {*of_block[block]}
    return found


INT8_BYTES = 1 + 4 / ALIGNMENT
"""Bytes per element of gradients in int8, their scales included."""


def data_parallel_traffic(config: RunConfig, world_size: int, rank: int = 0) -> dict[str, float]:
    """Return the bytes that a rank sends in a step of the full batch, by operation, with ring algorithms.

    For a bucket of B bytes sharded over n ranks, with c copies, and m micro-batches:

    ======  ==========================  =======================  ===================
    stage   reduce-scatter              all-reduce               all-gather
    ======  ==========================  =======================  ===================
    ZeRO-0                              2 B (c - 1) / c
    ZeRO-1  B (n - 1) / n               2 (B / n) (c - 1) / c    W (n - 1) / n
    ZeRO-2  m B (n - 1) / n             2 (B / n) (c - 1) / c    W (n - 1) / n
    ZeRO-3  m B (n - 1) / n             2 (B / n) (c - 1) / c    g W (n - 1) / n
    ======  ==========================  =======================  ===================

    W is the size of the bucket's weights in bytes, g their number of gathers (:func:`weight_gathers`). With gradient
    reduction in bf16, B counts two bytes per element, a reduce-scatter is an all-to-all, and an all-reduce is an
    all-to-all plus an all-gather. ZeRO-2 and 3 send less when the schedule delays weight gradients over several
    micro-batches.

    int8 is the same with 1.0625 bytes. The other compressions replace an all-reduce of F elements of matrices and V
    others by an all-reduce of V and of PowerSGD's factors, ``(m + n) RANK`` of an ``[m, n]`` matrix, or by one of V and
    an all-gather in which each rank sends the indices (int32) and values of ``RATIO F`` elements ``c - 1`` times.
    """
    layout = Layout.from_config(config.parallel, world_size)
    sent: dict[str, float] = defaultdict(float)
    parallel, wide, compression = config.parallel, main_param_bytes(config), config.parallel.compression
    pp_rank, *places = place_of(parallel, layout, rank)
    specs = rank_parameters(config, pp_rank)
    rounded = INT8_BYTES if parallel.grad_compression == "int8" else None
    if parallel.grad_reduce_in_bf16:
        rounded = DTYPE_BYTES["bf16"]
    reductions = get_num_microbatches(config.training, layout.sizes["dp"]) if parallel.zero_stage >= 2 else 1
    gathers = weight_gathers(config, layout, pp_rank) if parallel.reshards_after_forward else None
    for number, bucket in enumerate(bucket_shapes(config, layout, pp_rank)):
        size, shard = bucket.packing.size, bucket.packing.size // bucket.shards
        over_shards, over_copies = ((n - 1) / n for n in (bucket.shards, bucket.copies))
        times = 1 if gathers is None else gathers[number]
        sent["all-gather"] += times * size * WEIGHT_BYTES[bucket.key.dtype] * over_shards
        if not bucket.key.has_gradients:
            continue
        if rounded is not None:
            sent["all-to-all"] += (reductions * size * over_shards + shard * over_copies) * rounded
            sent["all-gather"] += shard * rounded * over_copies
            continue
        sent["reduce-scatter"] += reductions * size * wide * over_shards
        summed = shard
        if compression is not None and bucket.copies > 1:
            place = places[bucket.key.axes == EXPERT_REDUCE_AXES]
            blocks = compressed_blocks(bucket, specs, compression, place)
            elements = sum(block.numel for block in blocks)
            factors = sum(block.count * (block.rows + block.columns) for block in blocks) * compression.rank
            summed = shard - elements + factors
            sent["all-gather"] += _message_bytes(compression, elements, wide) * (bucket.copies - 1)
        sent["all-reduce"] += 2 * summed * wide * over_copies
    return {operation: count for operation, count in sent.items() if count}
