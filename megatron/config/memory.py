"""What a rank holds for the whole run, to the byte, from the configuration alone.

Buckets are cut here by the functions that cut them in a run, so what alignment costs is counted, and so is who has how
much of what data-parallel ranks share. Left out are single numbers (counts, scales: a few bytes each), activations,
and what lives within a step only, of which :func:`transient_bytes` has the largest part.
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
"""Of a number in each format."""

REMAINDER, INTEGER = 2, 8
"""Bytes of a master that is kept as what its weight lacks, and of an index."""

SUMS = 2
"""Sums of ZeRO-2's buckets, or of rounded addends, on their way at once; a test holds it to be that of the buckets."""

PARTS = ("weights", "gradients", "masters", "moments", "average", "buffers")
"""What a rank holds. Buffers are the frequencies of rotary positions, the steps among which spikes are found, and where
the rows of parameters with narrow state lie in the global tensor."""


def state_bytes(config: RunConfig, world_size: int) -> dict[str, int]:
    """Bytes on the rank that has most, by :data:`PARTS`.

    fp32 and fp64 weights are their own masters.

    Raises:
        ValueError: while the vocabulary's size is not known.
        ScheduleError: when the pipeline cannot share the layers.
        UserError: when the ranks are no grid.
    """
    layout = Layout.from_config(config.parallel, world_size)
    places = dict.fromkeys(_Place.of(config.parallel, layout, rank) for rank in range(world_size))
    stages = [_Stage.of(config, layout, pp) for pp in range(layout.sizes["pp"])]
    return max((stages[place.pp].held_at(place) for place in places), key=lambda held: sum(held.values()))


def rank_bytes(config: RunConfig, world_size: int, rank: int) -> dict[str, int]:
    """Bytes on one rank, by :data:`PARTS`; raises as :func:`state_bytes`."""
    layout = Layout.from_config(config.parallel, world_size)
    place = _Place.of(config.parallel, layout, rank)
    return _Stage.of(config, layout, place.pp).held_at(place)


def checkpoint_bytes(config: RunConfig) -> int:
    """Bytes of the tensors of a checkpoint: what is kept of every parameter in full, whatever the layout.

    Raises:
        ValueError: while the vocabulary's size is not known.
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
    """Bytes of a number at the precision of masters and sums of gradients."""
    return max(BYTES[config.precision.params_dtype], BYTES["fp32"])


def rank_parameters(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Elements of the parameters on the fullest rank, vocabulary padding included.

    A tied weight is on the ranks of the first and of the last stage, once on either.

    Raises:
        ValueError: while the vocabulary's size is not known.
        ScheduleError: when the pipeline cannot share the layers.
    """
    ranks = range(parallel.pipeline_model_parallel_size)
    return max(sum(p.numel for p in parameters(model, parallel, pp)) for pp in ranks)


def _is_muons(parameter: Parameter, config: OptimizerConfig) -> bool:
    """Whether Muon moves it, and so some rank the whole of it."""
    return config.optimizer == "muon" and parameter.of_block


def _moment_bytes(config: OptimizerConfig, muons: bool, wide: int) -> int:
    """Bytes of the moments of one element; ``wide`` is that of its master."""
    if muons or config.optimizer == "sgd":  # whose one momentum has no format of its own
        return wide
    formats = (config.exp_avg_dtype, config.exp_avg_sq_dtype)[: MOMENTS[config.optimizer]]
    return sum(BYTES["bf16"] if name == "bf16" else wide for name in formats)


@dataclass(frozen=True)
class _Place:
    """What decides how much a rank has: its pipeline rank, and which part of what data-parallel ranks cut."""

    pp: int
    dense: int
    expert: int

    @classmethod
    def of(cls, parallel: ParallelConfig, layout: Layout, rank: int) -> _Place:
        at = layout.coordinate(rank)
        replica = at["dp"] * layout.sizes["cp"] + at["cp"]
        dense, expert = (_shards(parallel, layout, expert)[0] for expert in (False, True))
        return cls(at["pp"], replica % dense, at["edp"] % expert)


def _shards(parallel: ParallelConfig, layout: Layout, expert: bool) -> tuple[int, int]:
    """Ranks that cut a bucket among themselves, and those that have the same part of it."""
    replicas = layout.sizes["edp"] if expert else layout.sizes["dp"] * layout.sizes["cp"]
    copies = parallel.optimizer_instances or replicas
    return replicas // copies, copies


@dataclass(frozen=True)
class Bucket:
    """Parameters that lie in one buffer, and ranks that cut it.

    Attributes:
        key: what the parameters have in common.
        parameters: in the order in which backward is done with them.
        packing: where they lie.
        shards: ranks that cut the bucket among themselves.
        copies: ranks that have the same part.
    """

    key: BucketKey
    parameters: tuple[Parameter, ...]
    packing: Packing
    shards: int
    copies: int

    def shares(self) -> Iterator[tuple[Parameter, int, int]]:
        """Every parameter with each part that it reaches into, and its elements there."""
        length = self.packing.size // self.shards
        for p in self.parameters:
            start = self.packing.offsets[p.name]
            stop = start + p.numel
            for part in range(start // length, (stop - 1) // length + 1):
                yield p, part, min((part + 1) * length, stop) - max(part * length, start)


def buckets(config: RunConfig, layout: Layout, pp_rank: int) -> Iterator[Bucket]:
    """The buckets of a pipeline rank, as they are made in a run; raises as :func:`parameters`."""
    parallel = config.parallel
    held = {p.name: p for p in parameters(config.model, parallel, pp_rank)}
    dtype, streamed = config.precision.params_dtype, parallel.zero_stage == 2
    keys = {
        name: BucketKey(dtype, p.axes, p.tied, _is_muons(p, config.optimizer), streamed and p.vector)
        for name, p in held.items()
    }
    sizes = {name: p.numel for name, p in held.items()}
    limits = limits_of(keys, sizes, parallel.ddp_bucket_size, lambda axes: _shards(parallel, layout, axes == EXPERT)[0])
    for key, names in partition(keys, sizes, limits):
        shards, copies = _shards(parallel, layout, key.axes == EXPERT)
        packing = pack({name: sizes[name] for name in names}, shards, copies, key.uncut)
        yield Bucket(key, tuple(held[name] for name in names), packing, shards, copies)


@dataclass
class _Stage:
    """What a pipeline rank holds: the same everywhere, and by the part of dense and of expert buckets."""

    fixed: dict[str, int]
    parts: dict[bool, list[dict[str, int]]]

    @classmethod
    def of(cls, config: RunConfig, layout: Layout, pp: int) -> _Stage:
        parts = {
            expert: [dict.fromkeys(PARTS, 0) for _ in range(_shards(config.parallel, layout, expert)[0])]
            for expert in (False, True)
        }
        stage = cls(dict.fromkeys(PARTS, 0) | {"buffers": _buffers(config, pp)}, parts)
        for bucket in buckets(config, layout, pp):
            stage._add(bucket, config)
        return stage

    def _add(self, bucket: Bucket, config: RunConfig) -> None:
        optimizer, size = config.optimizer, bucket.packing.size
        narrow = BYTES[config.precision.params_dtype]
        wide = master_bytes(config)
        streamed = config.parallel.zero_stage == 2 and bucket.shards > 1
        self.fixed["weights"] += size * narrow
        self.fixed["gradients"] += (size // bucket.shards if streamed else size) * wide
        each = {
            "masters": 0 if narrow == wide else REMAINDER if _remainders(config) else wide,
            "moments": _moment_bytes(optimizer, bucket.key.uncut, wide),
            "average": wide if optimizer.ema_decay is not None else 0,
        }
        index = INTEGER if _rounds(config) else 0
        parts = self.parts[bucket.key.axes == EXPERT]
        for parameter, part, elements in bucket.shares():
            for what, size_of_one in each.items():
                parts[part][what] += elements * size_of_one
            parts[part]["buffers"] += parameter.shape[0] * index

    def held_at(self, place: _Place) -> dict[str, int]:
        """Bytes of a rank by :data:`PARTS`."""
        dense, expert = self.parts[False][place.dense], self.parts[True][place.expert]
        return {part: self.fixed[part] + dense[part] + expert[part] for part in PARTS}


def _remainders(config: RunConfig) -> bool:
    return config.optimizer.store_param_remainders and config.precision.params_dtype == "bf16"


def _rounds(config: RunConfig) -> bool:
    """Whether the rule widens what it moves, and so knows which rows these are."""
    optimizer = config.optimizer
    formats = {"adam": (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype), "lion": (optimizer.exp_avg_dtype,)}
    return _remainders(config) or "bf16" in formats.get(optimizer.optimizer, ())


def _buffers(config: RunConfig, pp_rank: int) -> int:
    """Those that do not depend on parameters: of every stage the frequencies, and one window of losses and norms."""
    wide = master_bytes(config)
    stages = stages_by_rank(config.model, config.parallel)[pp_rank]
    window = 3 * INTEGER * config.optimizer.spike_window if config.optimizer.skip_spikes is not None else 0
    return len(stages) * (config.model.rotary_dim // 2) * wide + window


def transient_bytes(config: RunConfig, world_size: int) -> int:
    """At most so many bytes of gradients are on their way on the fullest rank, beside what is kept.

    On GPUs the sum over the ranks that cut a bucket takes the place of this rank's part (gloo, on CPUs, needs as much
    besides). What travels as bf16 is rounded into a buffer as large as the bucket, and comes in another, of as many
    buckets as are on their way at once. In ZeRO-2 the buckets themselves are there only from the first gradient of a
    micro-batch until they are summed, in buffers that go from one to the next of its size.

    Raises:
        ValueError: while the vocabulary's size is not known.
    """
    layout = Layout.from_config(config.parallel, world_size)
    wide = master_bytes(config)
    found = []
    for pp in range(layout.sizes["pp"]):
        reduced = [bucket for bucket in buckets(config, layout, pp) if bucket.shards * bucket.copies > 1]
        streamed = [bucket for bucket in reduced if config.parallel.zero_stage == 2 and bucket.shards > 1]
        kept = [bucket for bucket in reduced if bucket not in streamed]
        latest = [sorted(_sum_bytes(config, bucket) for bucket in kind)[-SUMS - 1 :] for kind in (streamed, kept)]
        found.append(sum(map(sum, latest)) + _streamed_elements(streamed, _in_turn(config, layout, pp)) * wide)
    return max(found)


def _in_turn(config: RunConfig, layout: Layout, pp: int) -> bool:
    """Whether gradients come layer by layer, the last first: from one stage, and with those of its activations."""
    if len(stages_by_rank(config.model, config.parallel)[pp]) > 1:
        return False
    program = program_for(config.parallel, microbatches(config.training, layout.sizes["dp"]))
    return all(action.kind != WEIGHT for action in program.ranks[pp])


def _sum_bytes(config: RunConfig, bucket: Bucket) -> int:
    """Of what a sum on its way needs besides its bucket."""
    return 2 * bucket.packing.size * BYTES["bf16"] if config.parallel.grad_reduce_in_bf16 else 0


def _streamed_elements(streamed: list[Bucket], in_turn: bool) -> int:
    """Of the whole buckets of ZeRO-2: those that wait for gradients, one of a kind where layers come in turn."""
    total = 0
    for size in {bucket.packing.size for bucket in streamed}:
        alike = [bucket.key for bucket in streamed if bucket.packing.size == size]
        total += size * (len(set(alike) if in_turn else alike) + SUMS)
    return total


def shown(count: float) -> str:
    """Format bytes of memory: ``12.50 MiB``, ``1.87 GiB``."""
    return format_bytes(count, binary=True)
