"""Memory and data-parallel communication of a rank in bytes, computed from the configuration without torch.

`parameter_shapes` lists the local parameters of a pipeline rank in the order of declaration; a test compares the list
with what the layers declare. `bucket_shapes` lays them out in gradient buckets with the functions that a run uses, so
alignment and uneven shards are counted exactly. Left out are scalars (a few bytes each), activations, and buffers that
exist only within a step; `reduction_buffer_bytes` estimates the largest of these.

All functions raise ``ValueError`` when the vocabulary size is not set, ``ScheduleError`` when the pipeline cannot
distribute the layers, and ``UserError`` when the number of ranks does not fit the layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from megatron.config.batch import get_num_microbatches
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.plugins import registered
from megatron.config.run import MOMENTS_PER_PARAMETER, OptimizerConfig, RunConfig
from megatron.distributed.layout import Layout
from megatron.distributed.param_layout import BucketKey, Packing, bucket_capacities, pack, partition_into_buckets
from megatron.distributed.sharding import DENSE_REDUCE_AXES, EXPERT_REDUCE_AXES, padded_vocab_size
from megatron.pipeline.actions import WEIGHT
from megatron.pipeline.partition import StageLayers
from megatron.pipeline.plan import build_program, stage_layers, stage_placement, virtual_stages

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
"""Name of the word embeddings; with tied embeddings also the output layer."""


@dataclass(frozen=True)
class ParameterShape:
    """Shape of a rank's part of a parameter."""

    name: str  # global name
    shape: tuple[int, ...]  # of the local tensor as stored: 1-D or 2-D, with padding
    axes: tuple[str, ...] = DENSE_REDUCE_AXES  # axes of the rank grid over which its gradients are summed
    tied: bool = False  # both embedding and output layer

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def vector(self) -> bool:
        """True for a 1-D parameter."""
        return len(self.shape) == 1

    @property
    def of_block(self) -> bool:
        """True for a matrix of a block, as opposed to the embeddings and the output layer."""
        return self.name.startswith("layers.") and not self.vector


def stages_by_rank(model: ModelConfig, parallel: ParallelConfig) -> list[list[StageLayers]]:
    """Return the stages of each pipeline rank."""
    stages: list[list[StageLayers]] = [[] for _ in range(parallel.pipeline_model_parallel_size)]
    ranks = stage_placement(parallel, virtual_stages(model, parallel))
    for rank, stage in zip(ranks, stage_layers(model, parallel), strict=True):
        stages[rank].append(stage)
    return stages


def parameter_shapes(model: ModelConfig, parallel: ParallelConfig, pp_rank: int) -> tuple[ParameterShape, ...]:
    """Return the parameters of a pipeline rank, in the order of declaration.

    They are the same on all ranks along the other axes. A tied weight appears once.
    """
    declared = (p for stage in stages_by_rank(model, parallel)[pp_rank] for p in _stage_shapes(model, parallel, stage))
    return tuple({parameter.name: parameter for parameter in declared}.values())


def _stage_shapes(m: ModelConfig, parallel: ParallelConfig, stage: StageLayers) -> Iterator[ParameterShape]:
    """Yield the parameters of a stage, with embeddings in the first and final norm and output layer in the last."""
    tp, tied = parallel.tensor_model_parallel_size, not m.untie_embeddings_and_output_weights
    if stage.first or stage.last:
        rows = padded_vocab_size(m.vocab, m.make_vocab_size_divisible_by, tp) // tp
    if stage.first:
        yield ParameterShape(WORD_EMBEDDINGS, (rows, m.hidden_size), tied=tied)
        if m.position_embedding_type == "learned_absolute":
            yield ParameterShape(
                "embedding.position_embeddings.weight", (m.max_position_embeddings or 0, m.hidden_size)
            )
    for layer in stage.layers:
        yield from _norm(m, f"layers.{layer}.input_layernorm", m.hidden_size)
        yield from _attention(m, f"layers.{layer}.self_attention", tp)
        yield from _norm(m, f"layers.{layer}.pre_mlp_layernorm", m.hidden_size)
        if m.num_experts is None:
            yield from _mlp(m, f"layers.{layer}.mlp", m.ffn // tp)
        else:
            yield from _experts(m, f"layers.{layer}.mlp", m.num_experts, parallel)
    if stage.last:
        yield from _norm(m, "final_layernorm", m.hidden_size)
        yield ParameterShape(WORD_EMBEDDINGS if tied else "output_layer.weight", (rows, m.hidden_size), tied=tied)


def _norm(m: ModelConfig, name: str, width: int) -> Iterator[ParameterShape]:
    yield ParameterShape(f"{name}.weight", (width,))
    if m.normalization == "LayerNorm":
        yield ParameterShape(f"{name}.bias", (width,))


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Iterator[ParameterShape]:
    yield ParameterShape(f"{name}.weight", (outputs, inputs))
    if bias:
        yield ParameterShape(f"{name}.bias", (outputs,))


def _attention(m: ModelConfig, name: str, tp: int) -> Iterator[ParameterShape]:
    # with more TP ranks than key/value heads, each rank holds a copy of one
    queries, groups = m.num_attention_heads // tp, max(1, m.kv_groups // tp)
    yield from _linear(f"{name}.linear_qkv", (queries + 2 * groups) * m.head_dim, m.hidden_size, m.qkv_bias)
    yield from _linear(f"{name}.linear_proj", m.hidden_size, queries * m.head_dim, m.add_bias_linear)
    if m.qk_layernorm:
        yield from _norm(m, f"{name}.q_layernorm", m.head_dim)
        yield from _norm(m, f"{name}.k_layernorm", m.head_dim)


def _mlp(m: ModelConfig, name: str, width: int) -> Iterator[ParameterShape]:
    yield from _linear(f"{name}.linear_fc1", width * (1 + m.gated), m.hidden_size, m.add_bias_linear)
    yield from _linear(f"{name}.linear_fc2", m.hidden_size, width, m.add_bias_linear)


def _experts(m: ModelConfig, name: str, experts: int, parallel: ParallelConfig) -> Iterator[ParameterShape]:
    local, width = experts // parallel.expert_model_parallel_size, m.expert_ffn // parallel.expert_tp
    fc1, fc2 = (local * width * (1 + m.gated), m.hidden_size), (local * m.hidden_size, width)
    yield ParameterShape(f"{name}.router.weight", (experts, m.hidden_size))
    yield ParameterShape(f"{name}.experts.linear_fc1.weight", fc1, EXPERT_REDUCE_AXES)
    yield ParameterShape(f"{name}.experts.linear_fc2.weight", fc2, EXPERT_REDUCE_AXES)
    if m.moe_shared_expert_intermediate_size:
        shared = m.moe_shared_expert_intermediate_size // parallel.tensor_model_parallel_size
        yield from _mlp(m, f"{name}.shared_experts", shared)


DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per element."""

REMAINDER_BYTES, INDEX_BYTES = 2, 8
"""Bytes of a main param stored as the remainder of its bf16 weight, and of an index."""

REDUCTIONS_IN_FLIGHT = 2
"""Concurrent reductions of ZeRO-2 buckets, or of bf16 gradients; a test compares it with the grad buffer's."""

STATE_KINDS = ("weights", "gradients", "main params", "moments", "average", "buffers")
"""Kinds of persistent state. Masters are the main params, average is the EMA. Buffers are rotary frequencies, the
window of the spike filter, and global row indices of parameters with low-precision state."""


def max_state_bytes(config: RunConfig, world_size: int) -> dict[str, int]:
    """Return the bytes on the rank with the most, by :data:`STATE_KINDS`.

    fp32 and fp64 weights have no separate main params.
    """
    layout = Layout.from_config(config.parallel, world_size)
    places = dict.fromkeys(_place(config.parallel, layout, rank) for rank in range(world_size))
    stages = [_StageState(config, layout, pp) for pp in range(layout.sizes["pp"])]
    states = (stages[pp].at(dense, expert) for pp, dense, expert in places)
    return max(states, key=lambda state: sum(state.values()))


def rank_state_bytes(config: RunConfig, world_size: int, rank: int) -> dict[str, int]:
    """Return the bytes on one rank, by :data:`STATE_KINDS`."""
    layout = Layout.from_config(config.parallel, world_size)
    pp, dense, expert = _place(config.parallel, layout, rank)
    return _StageState(config, layout, pp).at(dense, expert)


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the bytes of a checkpoint's tensors; they do not depend on the layout."""
    model, optimizer = config.model, config.optimizer
    wide = main_param_bytes(config)
    weights = wide * (2 if optimizer.ema_decay is not None else 1)
    whole = parameter_shapes(model, ParallelConfig(), 0)
    padding = sum(
        p.numel - model.vocab * model.hidden_size for p in whole if p.name in (WORD_EMBEDDINGS, "output_layer.weight")
    )
    moments = sum(p.numel * _moment_bytes(optimizer, _is_muons(p, optimizer), wide) for p in whole)
    moments -= padding * _moment_bytes(optimizer, False, wide)
    return model.num_parameters() * weights + moments


def main_param_bytes(config: RunConfig) -> int:
    """Return the bytes per element of main params and accumulated gradients."""
    return max(DTYPE_BYTES[config.precision.params_dtype], DTYPE_BYTES["fp32"])


def max_rank_parameters(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the parameter elements on the rank with the most, with vocabulary padding.

    A tied weight counts on the ranks of the first and of the last stage.
    """
    ranks = range(parallel.pipeline_model_parallel_size)
    return max(sum(p.numel for p in parameter_shapes(model, parallel, pp)) for pp in ranks)


def _is_muons(parameter: ParameterShape, config: OptimizerConfig) -> bool:
    """Return True if Muon updates the parameter; one rank then updates all of it."""
    return config.optimizer == "muon" and parameter.of_block


def _moment_bytes(config: OptimizerConfig, muons: bool, wide: int) -> int:
    """Return the bytes of an element's moments; ``wide`` is the size of its main param."""
    if muons or config.optimizer == "sgd":  # one momentum, always in the precision of the main params
        return wide
    plugin = registered("optimizer").get(config.optimizer)
    if plugin is not None:
        dtypes = {"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}
        formats = tuple(dtypes.get(kind, "fp32") for kind in plugin.state_kinds)
    else:
        formats = (config.exp_avg_dtype, config.exp_avg_sq_dtype)[: MOMENTS_PER_PARAMETER[config.optimizer]]
    return sum(DTYPE_BYTES["bf16"] if name == "bf16" else wide for name in formats)


def _place(parallel: ParallelConfig, layout: Layout, rank: int) -> tuple[int, int, int]:
    """Return what determines a rank's state: its pipeline rank, its shard of dense and of expert buckets."""
    at = layout.coordinate(rank)
    replica = at["dp"] * layout.sizes["cp"] + at["cp"]
    return at["pp"], replica % _shards(parallel, layout, False)[0], at["edp"] % _shards(parallel, layout, True)[0]


def _shards(parallel: ParallelConfig, layout: Layout, expert: bool) -> tuple[int, int]:
    """Return the number of shards of a bucket, and of ranks that hold the same shard."""
    replicas = layout.sizes["edp"] if expert else layout.sizes["dp"] * layout.sizes["cp"]
    copies = parallel.optimizer_instances or replicas
    return replicas // copies, copies


@dataclass(frozen=True)
class BucketShape:
    """Layout of a gradient bucket and its shards."""

    key: BucketKey  # what its parameters have in common
    parameters: tuple[ParameterShape, ...]  # in the order in which backward finishes them
    packing: Packing  # offsets of the parameters
    shards: int  # ranks over which the bucket is sharded
    copies: int  # ranks that hold the same shard

    def shares(self) -> Iterator[tuple[ParameterShape, int, int]]:
        """Yield (parameter, shard, number of the parameter's elements in the shard)."""
        length = self.packing.size // self.shards
        for p in self.parameters:
            start = self.packing.offsets[p.name]
            stop = start + p.numel
            for shard in range(start // length, (stop - 1) // length + 1):
                yield p, shard, min((shard + 1) * length, stop) - max(shard * length, start)


def bucket_shapes(config: RunConfig, layout: Layout, pp_rank: int) -> Iterator[BucketShape]:
    """Yield the buckets of a pipeline rank as a run lays them out."""
    parallel = config.parallel
    by_name = {p.name: p for p in parameter_shapes(config.model, parallel, pp_rank)}
    dtype = config.precision.params_dtype
    zero2 = parallel.zero_stage == 2
    keys = {
        name: BucketKey(dtype, p.axes, p.tied, _is_muons(p, config.optimizer), zero2 and p.vector)
        for name, p in by_name.items()
    }
    sizes = {name: p.numel for name, p in by_name.items()}
    limits = bucket_capacities(
        keys, sizes, parallel.ddp_bucket_size, lambda axes: _shards(parallel, layout, axes == EXPERT_REDUCE_AXES)[0]
    )
    for key, names in partition_into_buckets(keys, sizes, limits):
        shards, copies = _shards(parallel, layout, key.axes == EXPERT_REDUCE_AXES)
        packing = pack({name: sizes[name] for name in names}, shards, copies, key.uncut)
        yield BucketShape(key, tuple(by_name[name] for name in names), packing, shards, copies)


class _StageState:
    """State of the ranks of one pipeline rank, in bytes by :data:`STATE_KINDS`."""

    def __init__(self, config: RunConfig, layout: Layout, pp: int) -> None:
        self._common = dict.fromkeys(STATE_KINDS, 0)  # the same on all ranks
        self._sharded = {  # by shard of dense (False) and of expert (True) buckets
            expert: [dict.fromkeys(STATE_KINDS, 0) for _ in range(_shards(config.parallel, layout, expert)[0])]
            for expert in (False, True)
        }
        frequencies = config.model.rotary_dim // 2 * main_param_bytes(config)
        self._common["buffers"] = len(stages_by_rank(config.model, config.parallel)[pp]) * frequencies
        if config.optimizer.skip_spikes is not None:
            self._common["buffers"] += 3 * INDEX_BYTES * config.optimizer.spike_window
        for bucket in bucket_shapes(config, layout, pp):
            self._add(bucket, config)

    def _add(self, bucket: BucketShape, config: RunConfig) -> None:
        optimizer, size = config.optimizer, bucket.packing.size
        weight_bytes = DTYPE_BYTES[config.precision.params_dtype]
        wide = main_param_bytes(config)
        zero2 = config.parallel.zero_stage == 2 and bucket.shards > 1
        self._common["weights"] += size * weight_bytes
        self._common["gradients"] += (size // bucket.shards if zero2 else size) * wide
        remainders = optimizer.store_param_remainders and config.precision.params_dtype == "bf16"
        per_element = {
            "main params": 0 if weight_bytes == wide else REMAINDER_BYTES if remainders else wide,
            "moments": _moment_bytes(optimizer, bucket.key.uncut, wide),
            "average": wide if optimizer.ema_decay is not None else 0,
        }
        # An update rule that rounds its state stochastically stores the global row indices.
        formats = {"adam": (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype), "lion": (optimizer.exp_avg_dtype,)}
        index = INDEX_BYTES if remainders or "bf16" in formats.get(optimizer.optimizer, ()) else 0
        shards = self._sharded[bucket.key.axes == EXPERT_REDUCE_AXES]
        for parameter, shard, elements in bucket.shares():
            for kind, element_bytes in per_element.items():
                shards[shard][kind] += elements * element_bytes
            shards[shard]["buffers"] += parameter.shape[0] * index

    def at(self, dense: int, expert: int) -> dict[str, int]:
        """Return the bytes of a rank with these shards."""
        parts = self._common, self._sharded[False][dense], self._sharded[True][expert]
        return {kind: sum(part[kind] for part in parts) for kind in STATE_KINDS}


def reduction_buffer_bytes(config: RunConfig, world_size: int) -> int:
    """Return an upper bound for the bytes of gradient reduction in flight on the rank with the most.

    On GPUs a reduce-scatter writes into the rank's own shard (gloo, on CPUs, needs a second buffer of that size). A
    reduction in bf16 needs a send and a receive buffer of the bucket's size, for every concurrent reduction. In ZeRO-2
    a full bucket exists only from the first gradient of a micro-batch until its reduction; buckets of equal size reuse
    buffers.
    """
    layout = Layout.from_config(config.parallel, world_size)
    wide = main_param_bytes(config)
    bf16_buffers = 2 * DTYPE_BYTES["bf16"] if config.parallel.grad_reduce_in_bf16 else 0
    by_stage = []
    for pp in range(layout.sizes["pp"]):
        reduced = [bucket for bucket in bucket_shapes(config, layout, pp) if bucket.shards * bucket.copies > 1]
        zero2 = [bucket for bucket in reduced if config.parallel.zero_stage == 2 and bucket.shards > 1]
        others = [bucket for bucket in reduced if bucket not in zero2]
        total = 0
        for buckets in (zero2, others):
            sizes = sorted(bucket.packing.size for bucket in buckets)
            total += sum(sizes[-REDUCTIONS_IN_FLIGHT - 1 :]) * bf16_buffers
        # In layer order, only one bucket per key collects gradients at a time.
        in_layer_order = _finishes_in_layer_order(config, layout, pp)
        for size in {bucket.packing.size for bucket in zero2}:
            keys = [bucket.key for bucket in zero2 if bucket.packing.size == size]
            total += size * (len(set(keys) if in_layer_order else keys) + REDUCTIONS_IN_FLIGHT) * wide
        by_stage.append(total)
    return max(by_stage)


def _finishes_in_layer_order(config: RunConfig, layout: Layout, pp: int) -> bool:
    """Return True if gradients arrive layer by layer: one stage per rank, and no delayed weight gradients."""
    if len(stages_by_rank(config.model, config.parallel)[pp]) > 1:
        return False
    program = build_program(config.parallel, get_num_microbatches(config.training, layout.sizes["dp"]))
    return all(action.kind != WEIGHT for action in program.ranks[pp])


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
    """
    layout = Layout.from_config(config.parallel, world_size)
    sent: dict[str, float] = defaultdict(float)
    in_bf16 = config.parallel.grad_reduce_in_bf16
    grad_bytes = DTYPE_BYTES["bf16"] if in_bf16 else main_param_bytes(config)
    weight_bytes = DTYPE_BYTES[config.precision.params_dtype]
    reductions = get_num_microbatches(config.training, layout.sizes["dp"]) if config.parallel.zero_stage == 2 else 1
    for bucket in bucket_shapes(config, layout, pp_rank):
        size, shard = bucket.packing.size, bucket.packing.size // bucket.shards
        over_shards, over_copies = ((n - 1) / n for n in (bucket.shards, bucket.copies))
        sent["all-to-all" if in_bf16 else "reduce-scatter"] += reductions * size * grad_bytes * over_shards
        if in_bf16:
            sent["all-to-all"] += shard * grad_bytes * over_copies
            sent["all-gather"] += shard * grad_bytes * over_copies
        else:
            sent["all-reduce"] += 2 * shard * grad_bytes * over_copies
        sent["all-gather"] += size * weight_bytes * over_shards
    return {operation: count for operation, count in sent.items() if count}
