"""Memory of a rank's persistent state in bytes, computed from the configuration without torch.

Buckets are laid out by the functions that a run uses, so alignment and uneven shards are counted exactly. Left out are
scalars (a few bytes each), activations, and buffers that exist only within a step; :func:`transient_bytes` estimates
the largest of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.batch import microbatches
from megatron.config.model import ModelConfig
from megatron.config.numbers import format_bytes
from megatron.config.parallel import ParallelConfig
from megatron.config.parameters import WORDS, Parameter, parameters, stages_by_rank
from megatron.config.run import MOMENTS, OptimizerConfig, RunConfig
from megatron.parallel.layout import Layout
from megatron.parallel.ownership import BucketKey, Packing, limits_of, pack, partition
from megatron.parallel.shard import EXPERT
from megatron.pipeline.actions import WEIGHT
from megatron.pipeline.plan import program_for

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per element."""

REMAINDER, INTEGER = 2, 8
"""Bytes of a main param stored as the remainder of its bf16 weight, and of an index."""

SUMS = 2
"""Concurrent reductions of ZeRO-2 buckets, or of bf16 gradients; a test compares it with the grad buffer's."""

PARTS = ("weights", "gradients", "masters", "moments", "average", "buffers")
"""Kinds of persistent state. Masters are the main params, average is the EMA. Buffers are rotary frequencies, the
window of the spike filter, and global row indices of parameters with low-precision state."""


def state_bytes(config: RunConfig, world_size: int) -> dict[str, int]:
    """Return the bytes on the rank with the most, by :data:`PARTS`.

    fp32 and fp64 weights have no separate main params.

    Raises:
        ValueError: when the vocabulary size is not set.
        ScheduleError: when the pipeline cannot distribute the layers.
        UserError: when ``world_size`` does not fit the layout.
    """
    layout = Layout.from_config(config.parallel, world_size)
    places = dict.fromkeys(_Place.of(config.parallel, layout, rank) for rank in range(world_size))
    stages = [_StageState.of(config, layout, pp) for pp in range(layout.sizes["pp"])]
    return max((stages[place.pp].at(place) for place in places), key=lambda state: sum(state.values()))


def rank_bytes(config: RunConfig, world_size: int, rank: int) -> dict[str, int]:
    """Return the bytes on one rank, by :data:`PARTS`. Raises as :func:`state_bytes`."""
    layout = Layout.from_config(config.parallel, world_size)
    place = _Place.of(config.parallel, layout, rank)
    return _StageState.of(config, layout, place.pp).at(place)


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the bytes of a checkpoint's tensors; they do not depend on the layout.

    Raises:
        ValueError: when the vocabulary size is not set.
    """
    model, optimizer = config.model, config.optimizer
    wide = master_bytes(config)
    weights = wide * (2 if optimizer.ema_decay is not None else 1)
    whole = parameters(model, ParallelConfig(), 0)
    padding = sum(p.numel - model.vocab * model.hidden_size for p in whole if p.name in (WORDS, "output_layer.weight"))
    moments = sum(p.numel * _moment_bytes(optimizer, _is_muons(p, optimizer), wide) for p in whole)
    moments -= padding * _moment_bytes(optimizer, False, wide)
    return model.num_parameters() * weights + moments


def master_bytes(config: RunConfig) -> int:
    """Return the bytes per element of main params and accumulated gradients."""
    return max(BYTES[config.precision.params_dtype], BYTES["fp32"])


def rank_parameters(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the parameter elements on the rank with the most, with vocabulary padding.

    A tied weight counts on the ranks of the first and of the last stage.

    Raises:
        ValueError: when the vocabulary size is not set.
        ScheduleError: when the pipeline cannot distribute the layers.
    """
    ranks = range(parallel.pipeline_model_parallel_size)
    return max(sum(p.numel for p in parameters(model, parallel, pp)) for pp in ranks)


def _is_muons(parameter: Parameter, config: OptimizerConfig) -> bool:
    """Return True if Muon updates the parameter; one rank then updates all of it."""
    return config.optimizer == "muon" and parameter.of_block


def _moment_bytes(config: OptimizerConfig, muons: bool, wide: int) -> int:
    """Return the bytes of an element's moments; ``wide`` is the size of its main param."""
    if muons or config.optimizer == "sgd":  # one momentum, always in the precision of the main params
        return wide
    formats = (config.exp_avg_dtype, config.exp_avg_sq_dtype)[: MOMENTS[config.optimizer]]
    return sum(BYTES["bf16"] if name == "bf16" else wide for name in formats)


@dataclass(frozen=True)
class _Place:
    """Coordinates that determine a rank's state."""

    pp: int  # pipeline rank
    dense: int  # shard of dense buckets
    expert: int  # shard of expert buckets

    @classmethod
    def of(cls, parallel: ParallelConfig, layout: Layout, rank: int) -> _Place:
        at = layout.coordinate(rank)
        replica = at["dp"] * layout.sizes["cp"] + at["cp"]
        dense, expert = (_shards(parallel, layout, expert)[0] for expert in (False, True))
        return cls(at["pp"], replica % dense, at["edp"] % expert)


def _shards(parallel: ParallelConfig, layout: Layout, expert: bool) -> tuple[int, int]:
    """Return the number of shards of a bucket, and of ranks that hold the same shard."""
    replicas = layout.sizes["edp"] if expert else layout.sizes["dp"] * layout.sizes["cp"]
    copies = parallel.optimizer_instances or replicas
    return replicas // copies, copies


@dataclass(frozen=True)
class Bucket:
    """Layout of a gradient bucket and its shards."""

    key: BucketKey  # what its parameters have in common
    parameters: tuple[Parameter, ...]  # in the order in which backward finishes them
    packing: Packing  # offsets of the parameters
    shards: int  # ranks over which the bucket is sharded
    copies: int  # ranks that hold the same shard

    def shares(self) -> Iterator[tuple[Parameter, int, int]]:
        """Yield (parameter, shard, number of the parameter's elements in the shard)."""
        length = self.packing.size // self.shards
        for p in self.parameters:
            start = self.packing.offsets[p.name]
            stop = start + p.numel
            for shard in range(start // length, (stop - 1) // length + 1):
                yield p, shard, min((shard + 1) * length, stop) - max(shard * length, start)


def buckets(config: RunConfig, layout: Layout, pp_rank: int) -> Iterator[Bucket]:
    """Yield the buckets of a pipeline rank as a run lays them out. Raises as :func:`parameters`."""
    parallel = config.parallel
    by_name = {p.name: p for p in parameters(config.model, parallel, pp_rank)}
    dtype = config.precision.params_dtype
    zero2 = parallel.zero_stage == 2
    keys = {
        name: BucketKey(dtype, p.axes, p.tied, _is_muons(p, config.optimizer), zero2 and p.vector)
        for name, p in by_name.items()
    }
    sizes = {name: p.numel for name, p in by_name.items()}
    limits = limits_of(keys, sizes, parallel.ddp_bucket_size, lambda axes: _shards(parallel, layout, axes == EXPERT)[0])
    for key, names in partition(keys, sizes, limits):
        shards, copies = _shards(parallel, layout, key.axes == EXPERT)
        packing = pack({name: sizes[name] for name in names}, shards, copies, key.uncut)
        yield Bucket(key, tuple(by_name[name] for name in names), packing, shards, copies)


@dataclass
class _StageState:
    """State of the ranks of one pipeline rank, in bytes by :data:`PARTS`."""

    common: dict[str, int]  # the same on all ranks
    sharded: dict[bool, list[dict[str, int]]]  # by shard of dense (False) and of expert (True) buckets

    @classmethod
    def of(cls, config: RunConfig, layout: Layout, pp: int) -> _StageState:
        sharded = {
            expert: [dict.fromkeys(PARTS, 0) for _ in range(_shards(config.parallel, layout, expert)[0])]
            for expert in (False, True)
        }
        frequencies = config.model.rotary_dim // 2 * master_bytes(config)
        buffers = len(stages_by_rank(config.model, config.parallel)[pp]) * frequencies
        if config.optimizer.skip_spikes is not None:
            buffers += 3 * INTEGER * config.optimizer.spike_window
        stage = cls(dict.fromkeys(PARTS, 0) | {"buffers": buffers}, sharded)
        for bucket in buckets(config, layout, pp):
            stage._add(bucket, config)
        return stage

    def _add(self, bucket: Bucket, config: RunConfig) -> None:
        optimizer, size = config.optimizer, bucket.packing.size
        weight_bytes = BYTES[config.precision.params_dtype]
        wide = master_bytes(config)
        zero2 = config.parallel.zero_stage == 2 and bucket.shards > 1
        self.common["weights"] += size * weight_bytes
        self.common["gradients"] += (size // bucket.shards if zero2 else size) * wide
        per_element = {
            "masters": 0 if weight_bytes == wide else REMAINDER if _stores_remainders(config) else wide,
            "moments": _moment_bytes(optimizer, bucket.key.uncut, wide),
            "average": wide if optimizer.ema_decay is not None else 0,
        }
        index = INTEGER if _has_low_precision_state(config) else 0
        shards = self.sharded[bucket.key.axes == EXPERT]
        for parameter, shard, elements in bucket.shares():
            for kind, element_bytes in per_element.items():
                shards[shard][kind] += elements * element_bytes
            shards[shard]["buffers"] += parameter.shape[0] * index

    def at(self, place: _Place) -> dict[str, int]:
        """Return the bytes of a rank by :data:`PARTS`."""
        dense, expert = self.sharded[False][place.dense], self.sharded[True][place.expert]
        return {kind: self.common[kind] + dense[kind] + expert[kind] for kind in PARTS}


def _stores_remainders(config: RunConfig) -> bool:
    return config.optimizer.store_param_remainders and config.precision.params_dtype == "bf16"


def _has_low_precision_state(config: RunConfig) -> bool:
    """Return True if the update rule rounds its state stochastically, for which it stores the global row indices."""
    optimizer = config.optimizer
    formats = {"adam": (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype), "lion": (optimizer.exp_avg_dtype,)}
    return _stores_remainders(config) or "bf16" in formats.get(optimizer.optimizer, ())


def transient_bytes(config: RunConfig, world_size: int) -> int:
    """Return an upper bound for the bytes of gradient reduction in flight on the rank with the most.

    On GPUs a reduce-scatter writes into the rank's own shard (gloo, on CPUs, needs a second buffer of that size). A
    reduction in bf16 needs a send and a receive buffer of the bucket's size, for every concurrent reduction. In ZeRO-2
    a full bucket exists only from the first gradient of a micro-batch until its reduction; buckets of equal size reuse
    buffers.

    Raises:
        ValueError: when the vocabulary size is not set.
    """
    layout = Layout.from_config(config.parallel, world_size)
    wide = master_bytes(config)
    bf16_buffers = 2 * BYTES["bf16"] if config.parallel.grad_reduce_in_bf16 else 0
    by_stage = []
    for pp in range(layout.sizes["pp"]):
        reduced = [bucket for bucket in buckets(config, layout, pp) if bucket.shards * bucket.copies > 1]
        zero2 = [bucket for bucket in reduced if config.parallel.zero_stage == 2 and bucket.shards > 1]
        others = [bucket for bucket in reduced if bucket not in zero2]
        largest = [sorted(bucket.packing.size * bf16_buffers for bucket in b)[-SUMS - 1 :] for b in (zero2, others)]
        full_buckets = _zero2_buffer_elements(zero2, _finishes_in_layer_order(config, layout, pp)) * wide
        by_stage.append(sum(map(sum, largest)) + full_buckets)
    return max(by_stage)


def _finishes_in_layer_order(config: RunConfig, layout: Layout, pp: int) -> bool:
    """Return True if gradients arrive layer by layer: one stage per rank, and no delayed weight gradients."""
    if len(stages_by_rank(config.model, config.parallel)[pp]) > 1:
        return False
    program = program_for(config.parallel, microbatches(config.training, layout.sizes["dp"]))
    return all(action.kind != WEIGHT for action in program.ranks[pp])


def _zero2_buffer_elements(zero2: list[Bucket], in_layer_order: bool) -> int:
    """Return the elements of full ZeRO-2 buckets: those that collect gradients, and those being reduced.

    In layer order, only one bucket per key collects gradients at a time.
    """
    total = 0
    for size in {bucket.packing.size for bucket in zero2}:
        keys = [bucket.key for bucket in zero2 if bucket.packing.size == size]
        total += size * (len(set(keys) if in_layer_order else keys) + SUMS)
    return total


def shown(count: float) -> str:
    """Format bytes of memory: ``12.50 MiB``, ``1.87 GiB``."""
    return format_bytes(count, binary=True)
