"""Time of a pipeline stage for one micro-batch: its blocks, its ends, and the communication that nothing hides.

What hides a collective is part of its declaration (:class:`megatron.planner.communication.Collective`). Hidden behind
computing of c seconds, t seconds of communication cost ``max(0, t - c)``, and what is hidden slows computing down by
:data:`CONTENTION`. Computing hides one collective at a time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.distributed.sharding import UNSHARDED, Specs, padded_vocab_size
from megatron.layers.mixers.activations import ActivationShape
from megatron.layers.mixers.base import Mixer
from megatron.layers.mixers.registry import block_mixers
from megatron.layers.parameters import block, gpt
from megatron.layers.recompute_plan import RecomputePlan
from megatron.pipeline.actions import FORWARD, INPUT, WEIGHT
from megatron.pipeline.partition import StageLayers
from megatron.planner.activations import BlockMemory
from megatron.planner.block_time import KernelRates, PartTime, ProductShape, residual_layer_time, weight_product
from megatron.planner.communication import (
    AGAIN,
    ATTENTION,
    EXPERTS,
    INPUT_GRADIENT,
    PRODUCT,
    SHARED_EXPERT,
    WEIGHT_GRADIENT,
    Collective,
    delays_weight_gradients,
    end_collectives,
    mixer_collectives,
)
from megatron.planner.hardware import Cluster
from megatron.planner.network import seconds

COMPUTE, RECOMPUTE = "compute", "recompute"
"""Parts of the time of a stage, beside the axes of communication."""

CONTENTION = 0.12
"""Seconds that a second of hidden communication costs: NCCL's kernels take 16 of the 132 multiprocessors of an H100."""

LOSS_BYTES, EAGER_LOSS_BYTES = 4.5, 29
"""Times that each logit is read or written by cross-entropy and its gradient, with fused kernels and with PyTorch's:
differences between lengths and batches in ``benchmarks/results/launches.md``, column "rest"."""


def exposed(communicating: float, computing: float) -> float:
    """Return what communication of some seconds costs that runs beside ``computing`` seconds."""
    return max(0.0, communicating - computing) + CONTENTION * min(communicating, computing)


Sums = defaultdict[Any, float]
"""Sums by key."""


def _none() -> Sums:
    return defaultdict(float)


def merged(one: Mapping[bool, float], other: Mapping[bool, float]) -> Mapping[bool, float]:
    """Return the sums of two mappings by key."""
    return {key: one.get(key, 0.0) + other.get(key, 0.0) for key in one.keys() | other.keys()}


@dataclass
class StageTime:
    """Costs of a part of a stage for one micro-batch."""

    # Seconds by phase (F, I, W) and by part: computing, recomputing, communication by axis as far as it is exposed.
    spent: Sums = field(default_factory=_none)
    # Seconds by axis, hidden or not, and bytes that a rank sends.
    communicating: Sums = field(default_factory=_none)
    sent: Sums = field(default_factory=_none)
    # Elements of the parameters of a rank that have gradients, of experts (True) and others, and those without.
    parameters: Sums = field(default_factory=_none)
    frozen: Sums = field(default_factory=_none)
    # Elements of all of them that are in blocks.
    in_blocks: Sums = field(default_factory=_none)
    # Seconds by phase in which computing hides communication.
    hiding: Sums = field(default_factory=_none)
    # Bytes of activations that offload moves to the host, and back.
    offloaded: float = 0.0

    def add(self, other: StageTime, count: float = 1) -> None:
        """Add a part that occurs so many times."""
        for mine, theirs in zip(vars(self).values(), vars(other).values()):
            if isinstance(mine, defaultdict):
                for key, value in theirs.items():
                    mine[key] += count * value
        self.offloaded += count * other.offloaded

    def add_computing(self, time: PartTime, recomputed: bool = False) -> None:
        """Add what computing takes; its forward a second time if it is recomputed as a whole."""
        self.spent[FORWARD, COMPUTE] += time.forward
        self.spent[INPUT, COMPUTE] += time.input
        self.spent[WEIGHT, COMPUTE] += time.weight
        self.spent[INPUT, RECOMPUTE] += time.forward if recomputed else time.again

    def add_communication(self, cluster: Cluster, collectives: Iterable[Collective], time: PartTime) -> None:
        """Add collectives around a part that computes for this time."""
        again = {(AGAIN, name): once for (phase, name), once in time.products.items() if phase == FORWARD}
        beside = time.products | again
        left = dict(beside)
        for each in collectives:
            takes = each.times * seconds(cluster, each.operation, each.size, cluster.group(*each.ranks))
            self.communicating[each.axis] += takes
            self.sent[each.axis] += each.sent
            phase = INPUT if each.when == AGAIN else each.when
            bare, room = 0.0, 0.0
            if each.behind:
                place = (HIDING_PHASE.get(each.behind, each.when), HIDING_PART.get(each.behind, each.name))
                whole = left.get(place, 0.0)
                if each.behind == PRODUCT:  # part by part, of which one is not hidden
                    bare = takes / each.ranks.size
                elif each.behind == ATTENTION:  # step by step of the ring, of which one needs no message
                    whole = beside.get(place, 0.0) * (1 - 1 / each.ranks.size)
                elif each.behind == EXPERTS:  # half by half
                    whole = beside.get(place, 0.0) / 2
                room = min(whole, left.get(place, 0.0))
                used = min(takes - bare, room)
                left[place] = left.get(place, 0.0) - used
                self.hiding[INPUT if place[0] == AGAIN else place[0]] += used
            self.spent[phase, each.axis] += bare + exposed(takes - bare, room)

    def hide(self, phase: str, communicating: float) -> float:
        """Return what communication costs that F, or I with W, hides, as far as it hides nothing else."""
        phases = (FORWARD,) if phase == FORWARD else (INPUT, WEIGHT)
        left = max(
            0.0,
            sum(self.spent[each, part] for each in phases for part in (COMPUTE, RECOMPUTE))
            - sum(self.hiding[each] for each in phases),
        )
        self.hiding[phase] += min(communicating, left)
        return exposed(communicating, left)

    @cached_property
    def phases(self) -> tuple[float, float, float]:
        """Seconds of F, I and W."""
        found = _none()
        for (phase, _), once in self.spent.items():
            found[phase] += once
        return found[FORWARD], found[INPUT], found[WEIGHT]


HIDING_PHASE = {INPUT_GRADIENT: INPUT, WEIGHT_GRADIENT: WEIGHT}
"""Phase of the product that hides a collective, by what hides it; of the others the phase of the collective."""

HIDING_PART = {ATTENTION: ATTENTION, EXPERTS: EXPERTS, SHARED_EXPERT: SHARED_EXPERT}
"""Name of what hides a collective among the products of a part; of the others the name of the collective."""


@lru_cache(maxsize=16)
def _alike(model: ModelConfig, precision: PrecisionConfig) -> Mapping[int, int]:
    """Return the first layer whose block costs as much, by layer; those of heads are kinds of their own."""
    first, alike = dict[object, int](), dict[int, int]()
    for layer in (*range(model.num_layers), *model.head_layers):
        pattern = model.pattern(min(layer, model.num_layers - 1))
        fp8 = precision.layer_in_fp8(layer, model.num_layers)
        alike[layer] = first.setdefault((model.mixers(layer), pattern, fp8, layer >= model.num_layers), layer)
    return alike


class StageTimes:
    """Costs of the stages of all runs that differ in pipeline, data parallelism and recomputed blocks only."""

    def __init__(self, config: RunConfig, cluster: Cluster) -> None:
        """Start without any."""
        self.config, self.cluster = config, cluster
        self.rates = KernelRates.of(config, cluster)
        self._blocks: dict[tuple[int, bool], StageTime] = {}
        self._ends: dict[tuple[bool, bool], StageTime] = {}
        self._stages: dict[object, StageTime] = {}
        self._alike = _alike(config.model, config.precision)
        self._uniform = len({self._alike[layer] for layer in range(config.model.num_layers)}) == 1

    def of(self, stage: StageLayers) -> StageTime:
        """Return the costs of a stage."""
        key = (stage.count if self._uniform else stage.layers, stage.first, stage.last)
        if key not in self._stages:
            training, time = self.config.training, StageTime()
            offloaded, plan = training.cpu_offloading_num_layers, RecomputePlan.from_config(training, stage.count)
            kinds = Counter(
                (self._alike[layer], place < plan.blocks, place < offloaded) for place, layer in enumerate(stage.layers)
            )
            for (layer, recomputed, moved), count in kinds.items():
                time.add(self.block(layer, recomputed), count)
                time.offloaded += count * self._offloaded(layer, recomputed) if moved else 0.0
            if stage.first or stage.last:
                time.add(self.ends(stage.first, stage.last))
            self._stages[key] = time
        return self._stages[key]

    def block(self, layer: int, recomputed: bool) -> StageTime:
        """Return the costs of a block; ``recomputed`` as a whole."""
        if (layer, recomputed) not in self._blocks:
            config, time = self.config, StageTime()
            for place, mixer in enumerate(block_mixers(config.model, layer)):
                run = _Run(self._options_of(mixer), config, self.cluster)
                time.add(_residual_layer(run, layer, place, recomputed))
            shape = ActivationShape.of(config)
            _count(time, block(config.model, config.model.mixers(layer), shape.sharding))
            time.in_blocks.update(merged(time.parameters, time.frozen))
            self._blocks[layer, recomputed] = time
        return self._blocks[layer, recomputed]

    def _options_of(self, mixer: Mixer) -> tuple[object, ...]:
        """Return the options that the costs of a mixer depend on."""
        plan, parallel = RecomputePlan.from_config(self.config.training, 1), self.config.parallel
        return (
            *_common_options(self.config, self.cluster),
            *(getattr(parallel, name) for name in SEEN_OF_EXPERTS * _has_experts(self.config.model, mixer)),
            *(getattr(self.config.training, name) for name in ("micro_batch_size", "seq_length", "device")),
            (plan.modules, plan.mlp_chunk_size, delays_weight_gradients(parallel)),
        )

    def explain(self, layer: int) -> Iterator[str]:
        """Yield the formulas of a block with their numbers."""
        config, notes, time = self.config, list[str](), StageTime()
        for place, mixer in enumerate(block_mixers(config.model, layer)):
            computing = residual_layer_time(self.rates, config, layer, place, notes)
            collectives = mixer_collectives(config, mixer, layer, again=False)
            time.add_computing(computing)
            time.add_communication(self.cluster, collectives, computing)
            yield from notes
            notes.clear()
            for each in collectives:
                group = self.cluster.group(*each.ranks)
                takes = seconds(self.cluster, each.operation, each.size, group)
                yield (
                    f"{mixer.module}, {each.axis} {each.operation} ({each.when}, {each.name}): "
                    f"{each.size / 1e6:,.1f} MB, {group.size} ranks, {group.per_node} on a node, "
                    f"{each.times:g} x {takes * 1e3:.3f} ms, "
                    + (f"behind the {each.behind}" if each.behind else "not hidden")
                )
        forward, back, weight = (each * 1e3 for each in time.phases)
        yield f"a block: F {forward:.3f} ms, I {back:.3f} ms, W {weight:.3f} ms"

    def kinds(self) -> Counter[int]:
        """Return the number of blocks by the first one of their kind."""
        return Counter(self._alike.values())

    def _offloaded(self, layer: int, recomputed: bool) -> float:
        """Return the bytes of a block that offload moves."""
        if recomputed:
            return float(ActivationShape.of(self.config).residual)
        return float(BlockMemory.of(self.config, self.config.model.mixers(layer)).moved)

    def ends(self, first: bool, last: bool) -> StageTime:
        """Return the costs of the embedding and of the output layer, its heads included."""
        if (first, last) not in self._ends:
            config, shape, time = self.config, ActivationShape.of(self.config), StageTime()
            model, rates = config.model, self.rates
            if first:
                rows = shape.tokens * model.hidden_size
                backward = rates.moving(rows * (rates.width + 2 * shape.wide))  # read, and added to a wide gradient
                time.add_computing(PartTime(rates.moving(2 * rows * rates.width), backward))
            if last:
                time.add_computing(_output_layer(rates, shape))
                for layer in model.head_layers:
                    alone = RecomputePlan.from_config(config.training, 1)
                    time.add(self.block(self._alike[layer], alone.blocks > 0))
                    time.add_computing(_output_layer(rates, shape))
                    product = ProductShape(1, shape.rows, 2 * model.hidden_size, model.hidden_size)
                    time.add_computing(PartTime(*weight_product(rates, shape, product, fp8=False)))
            time.add_communication(self.cluster, end_collectives(config, first, last), PartTime())
            _count(time, gpt(model, shape.sharding, (), first, last))
            for layer in model.head_layers if last else ():
                for expert, elements in self.block(self._alike[layer], False).parameters.items():
                    time.parameters[expert] -= elements  # which gpt declares, too
            self._ends[first, last] = time
        return self._ends[first, last]


def _output_layer(rates: KernelRates, shape: ActivationShape) -> PartTime:
    """Return the time of the output layer, the loss and their gradients, all of which belong to forward."""
    model = shape.model
    rows = padded_vocab_size(model.vocab, model.make_vocab_size_divisible_by, shape.tp) // shape.tp
    product = ProductShape(1, shape.tokens, model.hidden_size, rows)
    passes = EAGER_LOSS_BYTES if "cross_entropy" in shape.eager else LOSS_BYTES
    loss = rates.moving(product.given * passes * rates.width, 8)
    norm = rates.moving(8 * shape.residual, 4)
    return PartTime(sum(weight_product(rates, shape, product, fp8=False)) + loss + norm)


def _count(time: StageTime, specs: Specs) -> None:
    """Count the elements of parameters."""
    for spec in specs.values():
        of = time.parameters if spec.has_gradient else time.frozen
        of[spec.expert] += prod((spec.dense or spec).local_shape)


@dataclass(frozen=True)
class _Run:
    """A run, equal to others whose stages have the same costs."""

    key: tuple[object, ...]
    config: RunConfig = field(compare=False)
    cluster: Cluster = field(compare=False)


@lru_cache(maxsize=512)
def _stage_times(run: _Run) -> StageTimes:
    return StageTimes(run.config, run.cluster)


def stage_times(config: RunConfig, cluster: Cluster) -> StageTimes:
    """Return the costs of the stages of a run from a cache."""
    parallel, training = config.parallel, config.training
    key = (
        *_common_options(config, cluster),
        *(getattr(parallel, name) for name in SEEN_OF_EXPERTS),
        *(getattr(training, name) for name in SEEN_OF_TRAINING),
        parallel.pipeline_schedule if parallel.pipeline_model_parallel_size > 1 else None,
    )
    return _stage_times(_Run(key, config, cluster))


def _common_options(config: RunConfig, cluster: Cluster) -> tuple[object, ...]:
    """Return the options that the costs of every residual layer depend on."""
    return (
        id(cluster),
        config.model,
        config.precision,
        config.compute.kernel_words,
        config.data.reset_attention_mask,
        config.data.reset_position_ids,
        *(getattr(config.parallel, name) for name in SEEN_OF_PARALLEL),
    )


@lru_cache(maxsize=4096)
def _residual_layer(run: _Run, layer: int, place: int, recomputed: bool) -> StageTime:
    """Return the costs of the residual layer at a place of a block."""
    config, cluster, time = run.config, run.cluster, StageTime()
    computing = residual_layer_time(KernelRates.of(config, cluster), config, layer, place)
    time.add_computing(computing, recomputed)
    mixer = block_mixers(config.model, layer)[place]
    time.add_communication(cluster, mixer_collectives(config, mixer, layer, recomputed), computing)
    return time


@lru_cache(maxsize=64)
def _has_experts(model: ModelConfig, mixer: Mixer) -> bool:
    return any(spec.expert for spec in mixer.parameters(model, UNSHARDED).values())


SEEN_OF_PARALLEL = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "tp_comm_overlap",
    "context_parallel_size",
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "reshards_after_forward",
)
SEEN_OF_EXPERTS = (
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "moe_exchange",
    "moe_exchange_bound",
    "moe_shared_expert_overlap",
    "overlap_moe_expert_parallel_comm",
)
SEEN_OF_TRAINING = (
    "micro_batch_size",
    "seq_length",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "mlp_chunk_size",
    "cross_entropy_chunk_size",
    "cpu_offloading_num_layers",
    "min_offloaded_tensor_size",
    "device",
    "objective",
)
"""Options that the costs of a stage depend on."""
