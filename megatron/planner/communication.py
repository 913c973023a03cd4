"""Communication of a rank in numbers: its collectives by stage, and the balance of context parallelism.

The collectives follow from what mixers declare: linears of the tensor-parallel region, what context parallelism
exchanges or passes on, what travels to experts. A linear of T rows with I inputs and O outputs of w bytes communicates
in forward (F), in the backward of its inputs (I) and with its weight gradient (W) (:mod:`megatron.layers.linear`):

===========  ===  ==========================  ============================================
layer             tensor parallelism          with sequence parallelism
===========  ===  ==========================  ============================================
column       F                                all-gather of x, T I w
..           I    all-reduce of dx, T I w     reduce-scatter of dx
..           W                                all-gather of x again
row          F    all-reduce of y, T O w      reduce-scatter of y
..           I                                all-gather of dy
..           W                                all-gather of dy again, where W is delayed
===========  ===  ==========================  ============================================

The embedding and the output layer are a row- and a column-parallel linear; the loss sums three numbers of a token.
Products in FP8 gather one byte per element.

Context parallelism: per layer, micro-batch and rank, forward and backward, with R ranks of a ring and A ranks that
exchange heads (see :mod:`megatron.distributed.context_parallel`), and k, q: the bytes of this rank's keys and values,
and of its queries:

==============  ==================================================================================================
p2p             3 k x (chunks of other ranks that a rank's queries see, on average) / 2; 3 k x 3/4 (R - 1) for plain
                causal attention. Keys and values are sent in forward and in backward, and their gradients once.
all_gather      3 k (R - 1): gathered in forward and in backward, and the gradients reduced and scattered.
a2a             2 (A - 1) / A x (2 q + c k): queries, keys, values and output in forward, and their gradients. Where A
                does not divide the key/value heads, each is sent c = lcm(heads, A) / heads times.
a2a+p2p         both, p2p with c k instead of k.
==============  ==================================================================================================

Recurrences pass on states, of a size that does not depend on the sequence: with s the bytes of the states after this
rank's chunks and of their transitions, and t those of the rows that the convolution reads before a chunk, all-gathers
and their adjoints send (R - 1) x (2 s + 3 t). Heads are exchanged as in a2a.

Recomputation repeats what forward sends, that of core attention without its output. Packed documents are ignored: with
them p2p sends less. Left out are sums of a few numbers: of tokens and norms, of a router's choices, scales of FP8.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

from megatron.config.attention_pattern import AttentionPattern
from megatron.config.batch import get_num_microbatches, loss_chunk_tokens
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.distributed.layout import Layout, chunks_of
from megatron.distributed.sharding import EXPERT_REDUCE_AXES
from megatron.layers.adapter_parameters import is_linear
from megatron.layers.mixers.activations import DTYPE_BYTES, ActivationShape
from megatron.layers.mixers.base import Mixer
from megatron.layers.mixers.core_attention import CORE
from megatron.layers.mixers.registry import block_mixers
from megatron.layers.recompute_plan import RecomputePlan
from megatron.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT
from megatron.pipeline.plan import schedule_name, stage_layers, stage_placement, virtual_stages
from megatron.pipeline.schedules import SCHEDULES, make_schedule
from megatron.planner.memory import INT8_BYTES, weight_gathers
from megatron.planner.rank_state import WEIGHT_BYTES, bucket_shapes, main_param_bytes, rank_parameters, shards_of

TENSOR, CONTEXT, EXPERT, PIPELINE, DATA = AXES = ("tensor", "context", "expert", "pipeline", "data")
"""Axes of communication."""

AGAIN, GRADIENTS, WEIGHTS = "again", "gradients", "weights"
"""When collectives happen, beside F, I and W: as backward computes forward again, at the end of a step's backward, and
before the next forward, or before a block in ZeRO-3."""

REDUCE, GATHER, SCATTER, EXCHANGE, SEND = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"
"""Operations."""

PRODUCT, INPUT_GRADIENT, WEIGHT_GRADIENT = "product", "input gradient", "weight gradient"
ATTENTION, EXPERTS, SHARED_EXPERT, STAGE, BLOCKS = "attention", "experts", "shared expert", "stage", "blocks"
"""Computation that hides a collective: the product of the same name, part by part, so that one of n parts is not
hidden; a product of the linear's backward; core attention, step by step of the ring; one half of the experts while
the other half travels; the shared expert; the next micro-batches of the stage; other blocks of the stage."""


class RankGroup(NamedTuple):
    """A group of ranks, as :meth:`megatron.planner.hardware.Cluster.group` takes it."""

    size: int
    # From one rank to the next.
    stride: int


class Collective(NamedTuple):
    """Equal collectives, or messages, of a rank."""

    # One of :data:`AXES`.
    axis: str
    # all-reduce, all-gather, reduce-scatter, all-to-all or send.
    operation: str
    # Bytes of the whole tensor: of the result of an all-gather, of the input of a reduce-scatter or an all-to-all.
    size: float
    ranks: RankGroup
    # F, I (backward without weight gradients), W or AGAIN of a micro-batch; GRADIENTS or WEIGHTS of a step.
    when: str
    # Of a product (:meth:`megatron.layers.mixers.base.Mixer.matmuls`), or of a part of the model.
    name: str
    # What hides it, as PRODUCT and the following constants name it; empty where the rank waits.
    behind: str = ""
    times: float = 1.0

    @property
    def sent(self) -> float:
        """Bytes that a rank sends (:mod:`megatron.distributed.comm`)."""
        share = 1.0 if self.operation == SEND else (self.ranks.size - 1) / self.ranks.size
        return self.times * self.size * share * (2 if self.operation == REDUCE else 1)


def micro_batch_collectives(config: RunConfig, world_size: int) -> tuple[tuple[Collective, ...], ...]:
    """Return what a rank of each stage does for a micro-batch, by stage; ``config`` has its vocabulary size."""
    model, parallel, training = config.model, config.parallel, config.training
    stages, found = stage_layers(model, parallel, training.seq_length), []
    for number, stage in enumerate(stages):
        plan = RecomputePlan.from_config(training, stage.count)
        own: list[Collective] = [*end_collectives(config, stage.first, stage.last)]
        for place, layer in enumerate(stage.layers):
            own += block_collectives(config, layer, place < plan.blocks)
        if stage.last:
            for layer in model.head_layers:
                own += block_collectives(config, layer, RecomputePlan.from_config(training, 1).blocks > 0)
        own += pipeline_messages(config, world_size, number)
        found.append(tuple(own))
    return tuple(found)


def block_collectives(config: RunConfig, layer: int, again: bool) -> tuple[Collective, ...]:
    """Return the collectives of a block for a micro-batch.

    Args:
        config: of the run.
        layer: global index of the block.
        again: the whole block is recomputed.
    """
    return tuple(
        each for mixer in block_mixers(config.model, layer) for each in mixer_collectives(config, mixer, layer, again)
    )


def mixer_collectives(config: RunConfig, mixer: Mixer, layer: int, again: bool) -> tuple[Collective, ...]:
    """Return the collectives of a mixer of a block; arguments as for :func:`block_collectives`."""
    plan = RecomputePlan.from_config(config.training, 1)
    own = [*_linears(config, mixer, layer, plan), *_context(config, mixer, layer, plan), *_dispatch(config, mixer)]
    if again or mixer.recomputed(plan):
        own += [each._replace(when=AGAIN) for each in own if each.when == FORWARD]
    return tuple(own)


def _linears(config: RunConfig, mixer: Mixer, layer: int, plan: RecomputePlan) -> Iterator[Collective]:
    """Yield those around the linears of the tensor-parallel region, and of rows that all its heads share."""
    shape, model, parallel = ActivationShape.of(config), config.model, config.parallel
    delayed, overlap = delays_weight_gradients(parallel), PRODUCT if parallel.tp_comm_overlap else ""
    in_fp8 = config.precision.layer_in_fp8(layer, model.num_layers)
    width, gathers_behind = (1, "") if in_fp8 else (shape.width, overlap)
    products, whole = mixer.matmuls(model, plan, 1.0), mixer.recomputed(plan)
    for parameter, spec in mixer.parameters(model, shape.sharding).items():
        if not is_linear(parameter) or spec.expert or spec.local_shape == spec.shape:
            continue
        name, row = parameter.removesuffix(".weight"), spec.row_parallel
        again, trained = products[name].again - whole, spec.has_gradient and model.lora_rank is None
        elements = shape.tokens * (prod(spec.local_view[:-1]) if row else spec.local_view[-1])
        gather = _of_rows(shape, GATHER, elements * width, name, gathers_behind)
        leave = _of_rows(shape, SCATTER, elements * shape.width, name, overlap)
        if row:
            # Unless one scale is for both products, FP8 gathers rows of dy for each of them.
            twice = delayed or (in_fp8 and config.precision.fp8_recipe != "tensorwise")
            behind = "" if delayed else INPUT_GRADIENT
            forward, backward, weight = leave, gather, gather._replace(behind=behind, times=trained and twice)
        else:
            behind = WEIGHT_GRADIENT if trained and not delayed else overlap
            forward, backward = gather, leave._replace(behind=behind)
            weight = gather._replace(behind="" if delayed else INPUT_GRADIENT, times=trained)
        yield from _present(shape, forward, forward._replace(when=AGAIN, times=again))
        yield from _present(shape, backward._replace(when=INPUT), weight._replace(when=WEIGHT))
    elements, again = mixer.shared_by_heads(model, plan)
    if size := shape.tokens * elements * shape.width:
        gather = _of_rows(shape, GATHER, size, "heads")
        yield from _present(shape, gather, gather._replace(when=AGAIN, times=again))
        yield from _present(shape, _of_rows(shape, SCATTER, size, "heads")._replace(when=INPUT))


def _of_rows(shape: ActivationShape, operation: str, size: float, name: str, behind: str = "") -> Collective:
    """Return a collective of rows of the tensor-parallel region, in forward."""
    operation = operation if shape.row_ranks > 1 or operation == GATHER else REDUCE
    return Collective(TENSOR, operation, size, RankGroup(shape.tp, 1), FORWARD, name, behind)


def _present(shape: ActivationShape, *collectives: Collective) -> Iterator[Collective]:
    """Yield those that exist: without sequence parallelism, each rank has all rows."""
    for each in collectives:
        if shape.tp > 1 and each.times > 0 and (shape.row_ranks > 1 or each.operation != GATHER):
            yield each


def _context(config: RunConfig, mixer: Mixer, layer: int, plan: RecomputePlan) -> Iterator[Collective]:
    """Yield those of context parallelism."""
    model, parallel, training = config.model, config.parallel, config.training
    tp, cp, heads_ranks = parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.cp_head_ranks
    heads, ring = RankGroup(heads_ranks, tp), RankGroup(cp // heads_ranks, tp * heads_ranks)
    width = DTYPE_BYTES[config.precision.params_dtype]
    of_element, wide = training.micro_batch_size * training.seq_length // cp * width, max(DTYPE_BYTES["fp32"], width)
    found: list[Collective] = []
    if (passed := mixer.passed(model, tp)) is not None:
        shared, chunks = passed.shared * parallel.kv_copies(passed.groups), 2 * training.micro_batch_size
        rows = min(passed.rows, training.seq_length // (2 * ring.size)) * (passed.convolved + shared) // heads_ranks
        of_states = chunks * passed.state // heads_ranks * wide * ring.size
        # The rows before a chunk are gathered in backward, too; states are kept.
        for size, gathers in ((chunks * rows * width * ring.size, (FORWARD, INPUT)), (of_states, (FORWARD,))):
            found += [Collective(CONTEXT, GATHER, size, ring, when, "states") for when in gathers]
            found += [Collective(CONTEXT, SCATTER, size, ring, INPUT, "states")]
        found += _exchanges(heads, of_element * (passed.inputs + shared), of_element * passed.output)
    if (exchanged := mixer.exchanged(model, tp)) is not None:
        keys = of_element * exchanged.keys * parallel.kv_copies(exchanged.groups)
        inputs, output = of_element * exchanged.queries + keys, of_element * exchanged.output
        if parallel.cp_comm_type == "all_gather":  # of keys, and of values
            passes = Collective(CONTEXT, GATHER, keys * ring.size / 2, ring, FORWARD, CORE, times=2)
            found += [passes, passes._replace(when=INPUT), passes._replace(operation=SCATTER, when=INPUT)]
        else:
            steps, pattern = ring.size - 1, model.pattern(layer)
            seen = sum(chunks_seen(pattern, training.seq_length, ring.size)) / ring.size / 2
            passed_on = keys * seen / max(1, steps)
            passes = Collective(CONTEXT, SEND, passed_on, ring, FORWARD, CORE, ATTENTION, steps * (seen > 0))
            found += [passes, passes._replace(when=INPUT, times=2 * passes.times)]
        found += _exchanges(heads, inputs, output)
        if CORE in plan.modules:
            found += [passes._replace(when=AGAIN), Collective(CONTEXT, EXCHANGE, inputs, heads, AGAIN, CORE)]
    yield from (each for each in found if each.ranks.size > 1 and each.times)


def _exchanges(ranks: RankGroup, inputs: float, output: float) -> list[Collective]:
    """Return those that exchange heads for rows and back, and the gradients of both."""
    sizes = ((when, size) for when in (FORWARD, INPUT) for size in (inputs, output))
    return [Collective(CONTEXT, EXCHANGE, size, ranks, when, CORE) for when, size in sizes]


def _dispatch(config: RunConfig, mixer: Mixer) -> Iterator[Collective]:
    """Yield those that bring tokens to their experts, and results back."""
    shape, parallel = ActivationShape.of(config), config.parallel
    ranks = RankGroup(parallel.expert_model_parallel_size * parallel.expert_tp, 1)
    routed = mixer.routed(shape)
    if routed is None or ranks.size == 1:
        return
    parts = 2 if parallel.overlap_moe_expert_parallel_comm else 1
    behind = SHARED_EXPERT if parallel.moe_shared_expert_overlap else EXPERTS if parts > 1 else ""
    one = Collective(EXPERT, EXCHANGE, 0, ranks, FORWARD, "dispatch", behind, parts)
    choices, rows = routed.rows * routed.choices * shape.wide / parts, routed.rows * routed.width * shape.width / parts
    if routed.numbers:
        yield one._replace(size=routed.numbers, behind="")
    for when in (FORWARD, INPUT):
        yield one._replace(size=choices, when=when)
        yield one._replace(size=rows, when=when)
        yield one._replace(size=rows, when=when, name="combine")


def end_collectives(config: RunConfig, first: bool, last: bool) -> Iterator[Collective]:
    """Yield the collectives of the embedding and of the output layer for a micro-batch, those of the heads included."""
    shape, model = ActivationShape.of(config), config.model
    depths, size = model.prediction_depths, shape.tokens * model.hidden_size * shape.width
    gather, leave = _of_rows(shape, GATHER, size, ""), _of_rows(shape, SCATTER, size, "")
    for uses in [1] * first + [depths] * (last and depths > 0):  # the tokens of all heads at once
        words = "embedding"
        yield from _present(shape, leave._replace(size=size * uses, name=words))
        trained = uses == 1 or not model.mtp_detach_heads
        yield from _present(shape, gather._replace(size=size * uses, when=INPUT, name=words, times=trained))
    if last and shape.tp > 1:
        uses, words = 1 + depths, "output_layer"
        yield from _present(shape, gather._replace(name=words, times=uses))
        yield from _present(shape, leave._replace(when=INPUT, name=words, times=uses))
        logits = model.vocab // shape.tp * (shape.wide if "cross_entropy" in shape.eager else shape.width)
        chunk = config.training.cross_entropy_chunk_size or loss_chunk_tokens(shape.tokens, logits, shape.on_gpu)
        chunks = -(-shape.tokens // chunk)
        for numbers in (1, 2):  # the largest logit; the sum of the exponentials, and the logit of the label
            of_chunk = shape.tokens / chunks * numbers * shape.wide
            yield Collective(TENSOR, REDUCE, of_chunk, RankGroup(shape.tp, 1), FORWARD, "loss", times=chunks * uses)


def pipeline_messages(config: RunConfig, world_size: int, stage: int) -> Iterator[Collective]:
    """Yield what a stage sends to the next one in forward and to the one before in backward, on other ranks."""
    parallel, size = config.parallel, ActivationShape.of(config).residual
    placement = stage_placement(parallel, virtual_stages(config.model, parallel))
    between = world_size // parallel.pipeline_model_parallel_size
    for when, other in ((FORWARD, stage + 1), (INPUT, stage - 1)):
        if 0 <= other < len(placement) and (distance := abs(placement[other] - placement[stage])):
            yield Collective(PIPELINE, SEND, size, RankGroup(2, distance * between), when, "hidden state", STAGE)


def delays_weight_gradients(parallel: ParallelConfig) -> bool:
    """Return True if a schedule computes most weight gradients apart from the gradients of inputs."""
    name = schedule_name(parallel, parallel.num_virtual_stages_per_pipeline_rank or 1)
    return parallel.pipeline_model_parallel_size > 1 and _delays(name)


@cache
def _delays(name: str) -> bool:
    """Return True for a schedule, by its name, with more W than whole backwards; files are expected to have W."""
    if name not in SCHEDULES:
        return True
    schedule = make_schedule(name, 2, SCHEDULES[name].chunks or 1, 8)
    kinds = Counter(action.kind for action in schedule.ranks[0])
    return kinds[WEIGHT] > kinds[BACKWARD]


def step_collectives(config: RunConfig, world_size: int, pp_rank: int) -> tuple[Collective, ...]:
    """Return what a rank does once a step, or for every micro-batch in ZeRO-2 and 3, to sum gradients over replicas.

    For every bucket of B bytes, as :func:`megatron.planner.memory.data_parallel_traffic` has the formulas. What
    PowerSGD and top-k send less is not counted.
    """
    parallel, layout = config.parallel, Layout.from_config(config.parallel, world_size)
    wide = main_param_bytes(config)
    reductions = get_num_microbatches(config.training, layout.sizes["dp"]) if parallel.zero_stage >= 2 else 1
    gathers = weight_gathers(config, layout, pp_rank) if parallel.reshards_after_forward else None
    rounded = INT8_BYTES if parallel.grad_compression == "int8" else None
    if parallel.grad_reduce_in_bf16:
        rounded = DTYPE_BYTES["bf16"]
    sums, whole = (BLOCKS if hides else "" for hides in (parallel.overlap_grad_reduce, parallel.gathers_during_compute))
    found: Counter[Collective] = Counter()
    for number, bucket in enumerate(bucket_shapes(config, layout, pp_rank)):
        expert, size, part = (
            bucket.key.axes == EXPERT_REDUCE_AXES,
            bucket.packing.size,
            bucket.packing.size // bucket.shards,
        )
        stride = parallel.expert_model_parallel_size * parallel.expert_tp if expert else layout.sizes["tp"]
        shards, copies = RankGroup(bucket.shards, stride), RankGroup(bucket.copies, stride * bucket.shards)
        weights = size * WEIGHT_BYTES[bucket.key.dtype]
        found[Collective(DATA, GATHER, weights, shards, WEIGHTS, "weights", whole)] += (
            1 if gathers is None else gathers[number]
        )
        if not bucket.key.has_gradients:
            continue
        if rounded is not None:
            found[Collective(DATA, EXCHANGE, size * rounded, shards, GRADIENTS, "gradients", sums)] += reductions
            found[Collective(DATA, EXCHANGE, part * rounded, copies, GRADIENTS, "gradients", sums)] += 1
            found[Collective(DATA, GATHER, part * rounded, copies, GRADIENTS, "gradients", sums)] += 1
            continue
        found[Collective(DATA, SCATTER, size * wide, shards, GRADIENTS, "gradients", sums)] += reductions
        found[Collective(DATA, REDUCE, part * wide, copies, GRADIENTS, "gradients", sums)] += 1
    of_buckets = (each._replace(times=times) for each, times in found.items() if each.ranks.size > 1)
    return (*of_buckets, *_partial_gradients(config, layout, pp_rank))


def _partial_gradients(config: RunConfig, layout: Layout, pp_rank: int) -> Iterator[Collective]:
    """Yield the sums of gradients that tensor-parallel ranks compute in part, and of a weight that two stages share.

    A rank sums what it updates; of a sharded optimizer that is counted as equal parts.
    """
    parallel, wide = config.parallel, main_param_bytes(config)
    placement = stage_placement(parallel, virtual_stages(config.model, parallel))
    ends: set[int] = {placement[0], placement[-1]}
    sizes: dict[RankGroup, float] = defaultdict(float)
    pipeline = RankGroup(2, layout.world_size // layout.sizes["pp"] * abs(placement[-1] - placement[0]))
    for spec in rank_parameters(config, pp_rank).values():
        wide_part = wide / shards_of(parallel, layout, spec.expert)[0] * spec.has_gradient
        for piece in spec.pieces:
            if piece.partial and len(piece.tp_ranks) > 1:
                sizes[RankGroup(len(piece.tp_ranks), 1)] += piece.local_box.numel * wide_part
        if spec.tied and len(ends) > 1 and pp_rank in ends:
            sizes[pipeline] += prod(spec.local_shape) * wide_part
    for ranks, size in sizes.items():
        axis = PIPELINE if ranks == pipeline else TENSOR
        yield Collective(axis, REDUCE, size, ranks, GRADIENTS, "shared gradients")


SAMPLED_QUERIES = 64
"""Queries of a chunk whose keys are counted for the balance."""


@dataclass(frozen=True)
class AttentionTraffic:
    """Messages, balance and memory of context-parallel attention, per layer and micro-batch: means over the layers."""

    # Bytes sent per layer, forward and backward; mean over the ranks.
    p2p: float
    all_gather: float
    a2a: float
    # Work of the slowest rank over the mean.
    balance: float
    # Bytes of other ranks' keys and values that a rank holds at a time.
    in_flight: float

    @property
    def sent(self) -> float:
        """Bytes sent per layer, forward and backward."""
        return self.p2p + self.all_gather + self.a2a


def attention_traffic(config: RunConfig) -> AttentionTraffic:
    """Return the cost of context parallelism of a run."""
    model, parallel, training = config.model, config.parallel, config.training
    tp, cp, heads_ranks = parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.cp_head_ranks
    ring, gathers = cp // heads_ranks, parallel.cp_comm_type == "all_gather"
    tokens = training.micro_batch_size * training.seq_length // cp
    of_element = tokens * DTYPE_BYTES[config.precision.params_dtype]
    p2p = all_gather = a2a = in_flight = 0.0
    work = [0.0] * ring
    stages = stage_layers(model, parallel, training.seq_length)
    plans = [(stage, RecomputePlan.from_config(training, stage.count)) for stage in stages]
    places = [(layer, layer - stage.layers.start < plan.blocks) for stage, plan in plans for layer in stage.layers]
    places += [(layer, RecomputePlan.from_config(training, 1).blocks > 0) for layer in model.head_layers]
    core = CORE in plans[0][1].modules
    wide = max(DTYPE_BYTES["fp32"], DTYPE_BYTES[config.precision.params_dtype])
    recurrent = [
        (again, passed)
        for layer, again in places
        for mixer in block_mixers(model, layer)
        if (passed := mixer.passed(model, tp)) is not None
    ]
    for again, passed in recurrent:
        shared, chunks = passed.shared * parallel.kv_copies(passed.groups), 2 * training.micro_batch_size
        rows = min(passed.rows, training.seq_length // (2 * ring)) * (passed.convolved + shared) // heads_ranks
        of_rows = chunks * rows * DTYPE_BYTES[config.precision.params_dtype]
        of_states = chunks * passed.state // heads_ranks * wide
        all_gather += (ring - 1) * ((3 + again) * of_rows + (2 + again) * of_states)
        sent = of_element * (passed.inputs + shared + passed.output)
        a2a += (2 + again) * sent * (heads_ranks - 1) / heads_ranks
    attending = [
        (layer, again, exchanged)
        for layer, again in places
        for mixer in block_mixers(model, layer)
        if (exchanged := mixer.exchanged(model, tp)) is not None
    ]
    for layer, again, exchanged in attending:
        queries, output = of_element * exchanged.queries, of_element * exchanged.output
        keys = of_element * exchanged.keys * parallel.kv_copies(exchanged.groups)
        in_flight = max(in_flight, keys * (ring if gathers else min(2, ring - 1)))
        pattern = model.pattern(layer)
        passes = 3 + (again or core)
        if gathers:
            all_gather += passes * keys * (ring - 1)
        else:
            p2p += passes * keys * sum(chunks_seen(pattern, training.seq_length, ring)) / ring / 2
        repeated = queries + keys + output if again else queries + keys if core else 0
        a2a += (2 * (queries + keys + output) + repeated) * (heads_ranks - 1) / heads_ranks
        work = [total + more for total, more in zip(work, ring_work(pattern, training.seq_length, ring))]
    layers = len(attending) + len(recurrent) or 1
    return AttentionTraffic(
        p2p=p2p / layers,
        all_gather=all_gather / layers,
        a2a=a2a / layers,
        balance=max(work) * ring / sum(work) if attending else 1.0,
        in_flight=in_flight,
    )


@lru_cache(maxsize=256)
def chunks_seen(pattern: AttentionPattern, length: int, ring: int) -> tuple[int, ...]:
    """Return how many chunks of other ranks the queries of each rank of a ring may see."""
    ranks = [chunks_of(length, ring, rank) for rank in range(ring)]
    return tuple(
        sum(any(_sees(pattern, q, k) for q in mine) for theirs in ranks if theirs != mine for k in theirs)
        for mine in ranks
    )


@lru_cache(maxsize=256)
def ring_work(pattern: AttentionPattern, length: int, ring: int) -> tuple[float, ...]:
    """Return the number of keys that the queries of each rank of a ring see, from a sample of them."""
    if ring == 1:
        return (1.0,)
    return tuple(
        sum(_visible_keys(pattern, q) for chunk in mine for q in chunk[:: -(-len(chunk) // SAMPLED_QUERIES)])
        for mine in (chunks_of(length, ring, rank) for rank in range(ring))
    )


def _sees(pattern: AttentionPattern, queries: range, keys: range) -> bool:
    """Return True if one of the queries may see one of the keys; a plugin's rule is ignored."""
    least, most = max(0, queries[0] - keys[-1]), queries[-1] - keys[0]
    if keys[0] < pattern.prefix or (keys[0] < pattern.first and most >= 0):
        return True
    if pattern.window is not None:
        most = min(most, pattern.window - 1)
    if pattern.chunk is not None and not (
        queries[0] // pattern.chunk <= keys[-1] // pattern.chunk
        and keys[0] // pattern.chunk <= queries[-1] // pattern.chunk
    ):
        return False
    return -(-least // pattern.dilation) * pattern.dilation <= most


def _visible_keys(pattern: AttentionPattern, query: int) -> int:
    """Return the number of keys that a query sees, without a plugin's rule."""
    near = max(0, query + 1 - (pattern.window or query + 1))
    if pattern.chunk is not None:
        near = max(near, query // pattern.chunk * pattern.chunk)
    if query < pattern.prefix:
        return pattern.prefix
    shown = min(max(pattern.first, pattern.prefix), query + 1)  # keys that all later tokens see
    return shown + max(0, (query - max(near, shown)) // pattern.dilation + 1)
