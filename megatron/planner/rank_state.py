"""Persistent state of the ranks in bytes: parameters, buckets of gradients, and what the optimizer keeps.

The time that it takes depends on the number of parameters of a rank, not on the number of ranks: pipeline ranks of
the same kind are computed once, and shards of a bucket that lie within one parameter are alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from megatron.config.model import ModelConfig, RotaryTable
from megatron.config.optimizer import OptimizerConfig, state_kinds
from megatron.config.parallel import GradCompression, ParallelConfig
from megatron.config.run import RunConfig
from megatron.distributed.layout import Layout
from megatron.distributed.param_layout import BucketKey, BucketShape, MatrixBlock, matrix_blocks, plan_buckets
from megatron.distributed.sharding import EXPERT_REDUCE_AXES, Sharding, ShardSpec, Specs
from megatron.layers.adapter_parameters import adapted_parts, linear_parts
from megatron.layers.mixers.activations import DTYPE_BYTES, INDEX_BYTES
from megatron.layers.mixers.registry import block_mixers, rotary_tables
from megatron.layers.parameters import gpt
from megatron.optimizer.param_groups import offloaded_params, rule_of
from megatron.pipeline.partition import StageLayers
from megatron.pipeline.plan import stage_layers, stage_placement, virtual_stages

QUANTIZED = "uint8"
"""Dtype of quantised weights, whose sizes are in bytes."""

WEIGHT_BYTES = DTYPE_BYTES | {QUANTIZED: 1}
"""Bytes per element of weights by the dtype of their bucket."""

REMAINDER_BYTES = 2
"""Bytes of a main param stored as the remainder of its bf16 weight."""


def stages_by_rank(config: RunConfig) -> tuple[tuple[StageLayers, ...], ...]:
    """Return the stages of each pipeline rank."""
    return _stages_by_rank(config.model, config.parallel, config.training.seq_length)


@lru_cache(maxsize=64)
def _stages_by_rank(
    model: ModelConfig, parallel: ParallelConfig, seq_length: int
) -> tuple[tuple[StageLayers, ...], ...]:
    stages: list[list[StageLayers]] = [[] for _ in range(parallel.pipeline_model_parallel_size)]
    ranks = stage_placement(parallel, virtual_stages(model, parallel))
    for rank, stage in zip(ranks, stage_layers(model, parallel, seq_length), strict=True):
        stages[rank].append(stage)
    return tuple(map(tuple, stages))


@lru_cache(maxsize=64)
def alike_layers(model: ModelConfig) -> tuple[int, ...]:
    """Return for every block the first one of its kind: they have the same sizes, and read the same rotary tables."""
    first: dict[object, int] = {}
    keys = (
        # Patterns name the layers that have adapters.
        layer if model.lora_rank is not None else (model.mixers(layer), *rotary_tables(model, [layer]))
        for layer in range(model.num_layers)
    )
    return tuple(first.setdefault(key, layer) for layer, key in enumerate(keys))


def kind_of_stage(model: ModelConfig, stage: StageLayers) -> tuple[object, ...]:
    """Return what determines the sizes of a stage."""
    return alike_layers(model)[stage.layers.start : stage.layers.stop], stage.first, stage.last


def rotary_tables_of(model: ModelConfig, stage: StageLayers) -> list[RotaryTable]:
    """Return the different tables of rotary positions of a stage."""
    layers = dict.fromkeys(alike_layers(model)[stage.layers.start : stage.layers.stop])
    return rotary_tables(model, (*layers, *(model.head_layers if stage.last else ())))


def alike_ranks(config: RunConfig) -> list[int]:
    """Return for every pipeline rank the first one whose stages have the same sizes, and the same layers in FP8."""
    first: dict[object, int] = {}
    model, precision = config.model, config.precision
    kinds = (
        tuple(
            (kind_of_stage(model, stage), *(precision.layer_in_fp8(layer, model.num_layers) for layer in stage.layers))
            for stage in stages
        )
        for stages in stages_by_rank(config)
    )
    return [first.setdefault(kind, pp) for pp, kind in enumerate(kinds)]


def rank_parameters(config: RunConfig, pp_rank: int) -> Specs:
    """Return the parameters of a pipeline rank; their local shapes are the same on all ranks along the other axes."""
    return _parameters(*_of_rank(config, pp_rank))


def _of_rank(config: RunConfig, pp_rank: int) -> tuple[ModelConfig, Sharding, tuple[int, ...], bool, bool]:
    """Return the arguments of :func:`_parameters` for a pipeline rank."""
    stages = stages_by_rank(config)[pp_rank]
    layers = tuple(layer for stage in stages for layer in stage.layers)
    first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
    return config.model, Sharding.of_first_rank(config.parallel), layers, first, last


@lru_cache(maxsize=64)
def _parameters(model: ModelConfig, sharding: Sharding, layers: tuple[int, ...], first: bool, last: bool) -> Specs:
    return gpt(model, sharding, layers, first, last)


def main_param_bytes(config: RunConfig) -> int:
    """Return the bytes per element of main params and accumulated gradients."""
    return max(DTYPE_BYTES[config.precision.params_dtype], DTYPE_BYTES["fp32"])


def moments_of(rule: str, config: RunConfig) -> tuple[int, bool]:
    """Return the bytes of an element's moments, and whether the update rule rounds any of them stochastically."""
    optimizer = config.optimizer
    dtypes = {"exp_avg": optimizer.exp_avg_dtype, "exp_avg_sq": optimizer.exp_avg_sq_dtype} if rule != "muon" else {}
    in_bf16 = [dtypes.get(kind) == "bf16" for kind in state_kinds(rule)]
    return sum(DTYPE_BYTES["bf16"] if low else main_param_bytes(config) for low in in_bf16), any(in_bf16)


def feature_copies(config: RunConfig) -> dict[str, int]:
    """Return the copies of its main parameters that the features of a run keep, by part (see `config.option`)."""
    return {
        part: copies * (getattr(group, option) is not None)
        for group in (*vars(config).values(), *config.plugin_options)
        for part, (option, copies) in getattr(group, "state_copies", {}).items()
    }


def place_of(parallel: ParallelConfig, layout: Layout, rank: int) -> tuple[int, int, int]:
    """Return what determines a rank's state: its pipeline rank, its shard of dense and of expert buckets."""
    at = layout.coordinate(rank)
    replica = at["dp"] * layout.sizes["cp"] + at["cp"]
    return at["pp"], replica % shards_of(parallel, layout, False)[0], at["edp"] % shards_of(parallel, layout, True)[0]


def shards_of(parallel: ParallelConfig, layout: Layout, expert: bool) -> tuple[int, int]:
    """Return the number of shards of a bucket, and of ranks that hold the same shard."""
    replicas = layout.sizes["edp"] if expert else layout.sizes["dp"] * layout.sizes["cp"]
    copies = parallel.optimizer_instances or replicas
    return replicas // copies, copies


def bucket_shapes(config: RunConfig, layout: Layout, pp_rank: int) -> tuple[BucketShape, ...]:
    """Return the buckets of a pipeline rank as a run lays them out."""
    parallel = config.parallel
    return _bucket_shapes(
        *_of_rank(config, pp_rank),
        config.precision.params_dtype,
        config.optimizer,
        parallel.zero_stage,
        parallel.bucket_size(layout.sizes["dp"] * layout.sizes["cp"]),
        shards_of(parallel, layout, False),
        shards_of(parallel, layout, True),
    )


@lru_cache(maxsize=128)
def _bucket_shapes(
    model: ModelConfig,
    sharding: Sharding,
    layers: tuple[int, ...],
    first: bool,
    last: bool,
    dtype: str,
    optimizer: OptimizerConfig,
    zero_stage: int,
    limit: int,
    dense: tuple[int, int],
    expert: tuple[int, int],
) -> tuple[BucketShape, ...]:
    specs = _parameters(model, sharding, layers, first, last)

    def key_of(name: str, spec: ShardSpec) -> BucketKey:
        kept = QUANTIZED if spec.dense is not None else "fp32" if spec.wide and dtype != "fp64" else dtype
        return BucketKey.of(name, spec, kept, rule_of(name, spec, optimizer) == "muon", zero_stage)

    if zero_stage == 3:  # a block of the name is part of the key
        keys = {name: key_of(name, spec) for name, spec in specs.items()}
    else:  # layers of one kind share their specs
        of_spec = {id(spec): (name, spec) for name, spec in specs.items()}
        found = {each: key_of(*named) for each, named in of_spec.items()}
        keys = {name: found[id(spec)] for name, spec in specs.items()}
    return tuple(plan_buckets(specs, keys, limit, lambda axes: expert if axes == EXPERT_REDUCE_AXES else dense))


class ElementState(NamedTuple):
    """Bytes per element of the state of a parameter that the optimizer or a component updates."""

    main_params: int = 0
    moments: int = 0
    # Of its weight in a copy on the host.
    weight: int = 0
    # The host updates it.
    offloaded: bool = False
    # Not of an element: the global index of a row.
    row: int = 0


Contents = Mapping[ElementState, int]
"""Elements and rows of a rank's shards, by what is kept of them."""


class ShardContents:
    """Contents of the shards of all buckets, as runs of shards with equal contents."""

    def __init__(self) -> None:
        self._changes: dict[int, Counter[ElementState]] = {0: Counter()}

    def add(self, start: int, stop: int, kept: ElementState, amount: int) -> None:
        """Add an amount to each of the shards ``start <= i < stop``."""
        for at, change in ((start, amount), (stop, -amount)):
            if at not in self._changes:
                self._changes[at] = Counter()
            self._changes[at][kept] += change

    @cached_property
    def runs(self) -> dict[int, Contents]:
        """The contents by the first of each run of shards with shares of the same parameters, ascending."""
        total, found = Counter[ElementState](), dict[int, Contents]()
        for at in sorted(self._changes):
            total.update(self._changes[at])
            found[at] = dict(total)
        return found

    @cached_property
    def starts(self) -> list[int]:
        """The first shard of each run."""
        return [*self.runs]

    def at(self, shard: int) -> Contents:
        """Return the contents of a shard."""
        return self.runs[self.starts[bisect_right(self.starts, shard) - 1]]


@dataclass(frozen=True)
class RankState:
    """State of the ranks of one pipeline rank."""

    config: RunConfig
    layout: Layout
    specs: Specs
    buckets: tuple[BucketShape, ...]
    # Bytes by part that are the same on all ranks.
    common: Counter[str]
    # Contents of the shards of dense (False) and of expert (True) buckets.
    shards: Mapping[bool, ShardContents]

    @classmethod
    def of(cls, config: RunConfig, layout: Layout, pp: int) -> RankState:
        """Compute the state of a pipeline rank."""
        model, parallel, wide = config.model, config.parallel, main_param_bytes(config)
        specs, buckets = rank_parameters(config, pp), bucket_shapes(config, layout, pp)
        common = Counter(buffers=_adapter_rows(model, specs))
        for stage in stages_by_rank(config)[pp]:
            common["buffers"] += sum(table.channels // 2 * wide for table in rotary_tables_of(model, stage))
            layers = Counter(alike_layers(model)[layer] for layer in stage.layers)
            layers.update(model.head_blocks if stage.last else ())
            for layer, count in layers.items():
                common["buffers"] += count * sum(mixer.buffer_bytes(model) for mixer in block_mixers(model, layer))
        common["buffers"] += sum(getattr(group, "buffer_bytes", 0) for group in vars(config).values())
        state = cls(config, layout, specs, buckets, common, {False: ShardContents(), True: ShardContents()})
        for bucket in buckets:
            size, part = bucket.packing.size, bucket.packing.size // bucket.shards
            common["weights"] += (part if parallel.zero_stage == 3 else size) * WEIGHT_BYTES[bucket.key.dtype]
            if bucket.key.has_gradients:
                common["gradients"] += (part if parallel.zero_stage >= 2 else size) * wide
                common["compression"] += part * wide * state._keeps_errors(bucket)
            if not bucket.key.frozen:
                state._add_shares(bucket)
        return state

    def at(self, dense: int, expert: int) -> tuple[Counter[str], Counter[str]]:
        """Return the bytes of a rank with these shards by part, on its device and on the host."""
        found = Counter(self.common), Counter[str]()
        if self.config.parallel.offloads_weights:  # not copies, and with the padding of buckets
            found[1]["weights"] = found[0].pop("weights")
        for kept, count in self._contents(dense, expert).items():
            for parts, of_each in zip(found, self._bytes_of(kept)):
                parts.update({part: count * size for part, size in of_each.items()})
        found[0]["compression"] += self._factors(dense, expert)
        return found

    def fullest(self, host: bool = False) -> Counter[str]:
        """Return the bytes on the rank with the most, on its device or on the ``host``."""
        sizes, parallel = self.layout.sizes, self.config.parallel
        widths = {False: sizes["tp"], True: sizes["ep"] * sizes["etp"]}  # neighbours with the same shard
        counts = {expert: max(1, shards_of(parallel, self.layout, expert)[0]) for expert in widths}
        ranks = widths[False] * counts[False]  # those of one replica of the state
        starts = {at * widths[expert] for expert, contents in self.shards.items() for at in contents.runs}
        if parallel.compression is not None:
            starts = {*range(0, ranks, min(widths.values()))}
        places = [(r // widths[False], r // widths[True] % counts[True]) for r in sorted({0, *starts}) if r < ranks]
        if parallel.compression is not None or self._offloads_some:
            return max((self.at(*place)[host] for place in places), key=Counter.total)
        kinds = {kept for contents in self.shards.values() for kept in contents.at(ranks)}
        sizes_of = {kept: self._bytes_of(kept)[host].total() for kept in kinds}

        def total(place: tuple[int, int]) -> int:
            at = (contents.at(shard) for contents, shard in zip(self.shards.values(), place))
            return sum(sizes_of[kept] * count for each in at for kept, count in each.items())

        return self.at(*max(places, key=total))[host]

    @property
    def _offloads_some(self) -> bool:
        """True if the host updates some parameters of a shard, which depend on its other ones."""
        return self.config.optimizer.optimizer_cpu_offload and self.config.optimizer.optimizer_offload_fraction < 1

    def _keeps_errors(self, bucket: BucketShape) -> bool:
        """Return True if the errors of a bucket's compressed gradients are kept."""
        compression = self.config.parallel.compression
        return compression is not None and compression.has_errors and bucket.copies > 1

    def _kept(self, bucket: BucketShape, name: str, offloaded: bool) -> tuple[ElementState, int]:
        """Return what is kept of an element of a parameter, and of how many rows indices are kept."""
        if bucket.key.buffer:
            return ElementState(), 0
        optimizer, spec, wide = self.config.optimizer, self.specs[name], main_param_bytes(self.config)
        weight, (moments, rounded) = (
            WEIGHT_BYTES[bucket.key.dtype],
            moments_of(rule_of(name, spec, optimizer), self.config),
        )
        remainders = optimizer.store_param_remainders and bucket.key.dtype == "bf16"
        main = 0 if weight == wide else REMAINDER_BYTES if remainders else wide
        in_copy = wide if spec.wide else DTYPE_BYTES[self.config.precision.params_dtype]
        return ElementState(main, moments, in_copy, offloaded), spec.local_shape[0] * (remainders or rounded)

    def _add_shares(self, bucket: BucketShape) -> None:
        """Add the shares of a bucket's parameters."""
        length, of_spec = bucket.packing.size // bucket.shards, dict[int, tuple[ElementState, int]]()
        contents, optimizer = self.shards[_is_expert(bucket)], self.config.optimizer
        for name, numel in bucket.sizes.items():
            spec = self.specs[name]
            if id(spec) not in of_spec:
                offloaded = optimizer.optimizer_cpu_offload and rule_of(name, spec, optimizer) != "muon"
                of_spec[id(spec)] = self._kept(bucket, name, offloaded)
            kept, rows = of_spec[id(spec)]
            start = bucket.packing.offsets[name]
            first, last = start // length, (start + numel - 1) // length
            if first == last:
                contents.add(first, first + 1, kept, numel)
            else:
                contents.add(first, first + 1, kept, (first + 1) * length - start)
                contents.add(first + 1, last, kept, length)
                contents.add(last, last + 1, kept, start + numel - last * length)
            if rows:
                contents.add(first, last + 1, kept._replace(row=INDEX_BYTES), rows)

    def _contents(self, dense: int, expert: int) -> Contents:
        """Return the contents of a rank with these shards of dense and of expert buckets."""
        found = Counter[ElementState]()
        if not self._offloads_some:
            found.update(self.shards[False].at(dense))
            found.update(self.shards[True].at(expert))
            return found
        shares = {}
        for bucket in self.buckets:
            shard = expert if _is_expert(bucket) else dense
            for name, numel in bucket.sizes.items() if not bucket.key.frozen else ():
                share = bucket.packing.shard_in_part(name, numel, shard, bucket.shards)
                if share is not None:
                    shares[name] = bucket, share.numel
        trained = {name: count for name, (_, count) in shares.items() if self.specs[name].has_gradient}
        moved = offloaded_params(trained, self.specs, self.config.optimizer)
        for name, (bucket, count) in shares.items():
            kept, rows = self._kept(bucket, name, name in moved)
            found[kept] += count
            found[kept._replace(row=INDEX_BYTES)] += rows
        return found

    def _bytes_of(self, kept: ElementState) -> tuple[Counter[str], Counter[str]]:
        """Return the bytes of an element or a row by part, on the device and on the host."""
        device, host, wide = Counter[str](), Counter[str](), main_param_bytes(self.config)
        found = host if kept.offloaded else device
        if kept.row:
            found["buffers"] = kept.row
            return device, host
        found.update({part: number * wide for part, number in feature_copies(self.config).items()})
        found.update({"main params": kept.main_params, "moments": kept.moments})
        if kept.offloaded:
            host["weights"] = kept.weight * (not self.config.parallel.offloads_weights)
            host["gradients"] = wide
        return device, host

    def _factors(self, dense: int, expert: int) -> int:
        """Return the bytes of PowerSGD's factors of a rank with these shards."""
        compression, columns = self.config.parallel.compression, 0
        if compression is None:
            return 0
        for bucket in self.buckets:
            if bucket.key.has_gradients and self._keeps_errors(bucket):
                shard = expert if _is_expert(bucket) else dense
                blocks = compressed_blocks(bucket, self.specs, compression, shard)
                columns += sum(block.count * block.columns for block in blocks)
        return columns * compression.rank * main_param_bytes(self.config)


def _is_expert(bucket: BucketShape) -> bool:
    return bucket.key.axes == EXPERT_REDUCE_AXES


def compressed_blocks(bucket: BucketShape, specs: Specs, compression: GradCompression, shard: int) -> list[MatrixBlock]:
    """Return the matrices that are compressed in a shard of a bucket."""
    own = {name: specs[name] for name in bucket.sizes}
    return matrix_blocks(bucket.packing, own, shard, bucket.shards, compression.rank)


def _adapter_rows(model: ModelConfig, specs: Specs) -> int:
    """Return the bytes that record which rows of fused weights belong to which adapted part."""
    if model.lora_rank is None:
        return 0
    return sum(
        spec.local_shape[0] * len(adapted_parts(model, name.removesuffix(".weight"), spec))
        for name, spec in specs.items()
        if name.endswith(".weight") and len(linear_parts(spec)) > 1
    )
