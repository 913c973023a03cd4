"""Time of a training step, predicted from the configuration without torch.

The time of a micro-batch on a stage is that of its kernels (:mod:`megatron.planner.block_time`) and of the
communication that nothing hides (:mod:`megatron.planner.stage_time`). The schedule makes a step of them
(:mod:`megatron.planner.pipeline_time`), to which reductions, gathers and the optimizer's update are added as far as
they are not hidden behind computing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil

from megatron.config.batch import get_num_microbatches
from megatron.config.optimizer import state_kinds
from megatron.config.run import RunConfig
from megatron.distributed.layout import Layout
from megatron.layers.mixers.activations import DTYPE_BYTES, ActivationShape
from megatron.pipeline.actions import FORWARD, INPUT
from megatron.pipeline.partition import StageLayers
from megatron.pipeline.plan import build_program, resolve_pipeline, stage_layers, stage_placement
from megatron.pipeline.simulate import StageCosts, Timeline, simulate
from megatron.planner.communication import AXES as AXES
from megatron.planner.communication import DATA, GRADIENTS, PIPELINE, SEND, Collective, RankGroup
from megatron.planner.hardware import Cluster
from megatron.planner.memory import INT8_BYTES
from megatron.planner.network import seconds
from megatron.planner.pipeline_time import pipeline_end
from megatron.planner.rank_state import main_param_bytes, shards_of
from megatron.planner.stage_time import COMPUTE, RECOMPUTE, StageTime, merged, stage_times

BUBBLE, OFFLOAD, OPTIMIZER = "bubble", "offload", "optimizer"
PARTS = (COMPUTE, RECOMPUTE, BUBBLE, *AXES, OFFLOAD, OPTIMIZER)
"""Parts of the time of a step; of communication and offload only what is exposed."""

UPDATE_BYTES = 22
"""Bytes per element that an update moves beside its moments, which it reads and writes: 4 for the norm of the
gradient, 4 for the gradient, 8 for the main parameter, 2 for the weight, 4 measured beyond: 38 for AdamW
(``benchmarks/results/launches.md``, differences of layers of equal tokens)."""

HOST_UPDATE = 50e9
"""Bytes per second that the processors of a node update, at least: a whole step of 3.1 x 10^9 parameters of 38 bytes on
128 cores takes 2.4 s (deepspeedai/DeepSpeed#7474)."""


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step of the full batch."""

    # Seconds that add up to those of the step, by :data:`PARTS`: means over the ranks.
    parts: Mapping[str, float]
    # By axis of communication: bytes that a rank sends in a step, and the seconds that it takes, hidden or not.
    sent: Mapping[str, float]
    communicating: Mapping[str, float]
    # Seconds of F, I and W by stage, and of a transfer between stages.
    stages: StageCosts
    # Micro-batches of a rank, and tokens of a step over all ranks.
    microbatches: int
    tokens: int
    # Of which the formulas are shown.
    step: _Step = field(compare=False, repr=False)

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def bubble(self) -> float:
        """Fraction of a step in which ranks wait for other stages."""
        return self.parts[BUBBLE] / self.seconds

    @property
    def explanation(self) -> tuple[str, ...]:
        """Formulas with their numbers."""
        return (*self.step.explain(self.stages), f"a step: {_sum_of(self.parts)} = {self.seconds:.4f} s")


@dataclass(frozen=True)
class _Step:
    """A run on a cluster, with what its parts share."""

    config: RunConfig
    cluster: Cluster
    layout: Layout
    microbatches: int
    # Of every stage: its pipeline rank, and its costs for one micro-batch; stages alike are one object.
    placement: tuple[int, ...]
    stages: tuple[StageTime, ...]

    @classmethod
    def of(cls, config: RunConfig, world_size: int, cluster: Cluster) -> _Step:
        config = replace(config, parallel=resolve_pipeline(config.model, config.parallel))
        layout, times = Layout.from_config(config.parallel, world_size), stage_times(config, cluster)
        placement = stage_placement(config.parallel, config.parallel.num_virtual_stages_per_pipeline_rank or 1)
        layers = stage_layers(config.model, config.parallel, config.training.seq_length)
        count = get_num_microbatches(config.training, layout.sizes["dp"])
        step = cls(config, cluster, layout, count, placement, tuple(map(times.of, layers)))
        made = {number: _with_replicas(step, stage) for number, stage in {id(s): s for s in step.stages}.items()}
        return replace(step, stages=tuple(made[id(stage)] for stage in step.stages))

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return self.layout.sizes["pp"]

    @property
    def message(self) -> int:
        """Bytes that a stage sends to the next one for a micro-batch."""
        return ActivationShape.of(self.config).residual

    def costs(self) -> StageCosts:
        """Return the seconds of every stage, and of a message between them."""
        forward, back, weight = zip(*(stage.phases for stage in self.stages))
        group = self.cluster.group(2, self.layout.world_size // self.ranks)
        transfer = seconds(self.cluster, SEND, self.message, group) if self.ranks > 1 else 0.0
        return StageCosts(forward, back, weight, transfer=transfer)

    def ends(self) -> list[_StepEnd]:
        """Return the end of a step on each pipeline rank."""
        held: list[list[StageTime]] = [[] for _ in range(self.ranks)]
        for stage, rank in zip(self.stages, self.placement):
            held[rank].append(stage)
        keys, found = [tuple(map(id, stages)) for stages in held], dict[tuple[int, ...], _StepEnd]()
        for key, stages in zip(keys, held):
            if key not in found:
                found[key] = _StepEnd.of(self, stages)
        return [found[key] for key in keys]

    def explain(self, costs: StageCosts) -> Iterator[str]:
        """Yield the formulas of a step with their numbers."""
        training, parallel, cluster, sizes = self.config.training, self.config.parallel, self.cluster, self.layout.sizes
        tokens = training.micro_batch_size * training.seq_length // parallel.context_parallel_size
        yield (
            f"a micro-batch: {training.micro_batch_size} x {training.seq_length:,} tokens / CP "
            f"{parallel.context_parallel_size} = {tokens:,}; {self.microbatches} of them a step"
        )
        times = stage_times(self.config, cluster)
        for layer, count in times.kinds().items():
            yield f"block {layer}, {count} like it:"
            yield from (f"  {line}" for line in times.explain(layer))
        shown = dict[int, list[int]]()
        for number, stage in enumerate(self.stages):
            shown.setdefault(id(stage), []).append(number)
        for numbers in shown.values():
            stage, spent = self.stages[numbers[0]], dict.fromkeys(PARTS, 0.0)
            for (_, part), once in stage.spent.items():
                spent[part] += once
            phases = ", ".join(f"{name} {once * 1e3:.3f} ms" for name, once in zip("FIW", stage.phases))
            named = f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {numbers[0]} to {numbers[-1]}"
            yield f"{named}: {phases}, of which {_sum_of(spent)}"
        end, ranks = pipeline_end(parallel, self.microbatches, costs), self.ranks
        if ranks > 1:
            slots = ranks - 1, self.microbatches * (parallel.num_virtual_stages_per_pipeline_rank or 1)
            yield (
                f"{parallel.pipeline_schedule}: {ranks} ranks, {len(self.stages)} stages, {self.microbatches} "
                f"micro-batches end after {end.makespan:.4f} s, of which ranks compute {sum(end.busy) / ranks:.4f} s; "
                f"1F1B with equal stages idles (p - 1) / (m v + p - 1) = {slots[0] / sum(slots):.1%}; a message of "
                f"{self.message / 1e6:,.1f} MB takes {costs.transfer * 1e3:.3f} ms"
            )
        for rank, own in sorted({id(own): (rank, own) for rank, own in enumerate(self.ends())}.values()):
            stages = [stage for stage, at in zip(self.stages, self.placement) if at == rank]
            elements = sum(sum(stage.parameters.values()) for stage in stages)
            yield (
                f"rank {rank} of the pipeline: {elements / 1e6:,.1f} M parameters over {sizes['dp'] * sizes['cp']} "
                f"replicas, {own.sent / 1e6:,.1f} MB sent at the end of a step in {own.communicating * 1e3:.3f} ms, "
                f"not hidden: gradients {own.reducing * 1e3:.3f} ms, weights {own.gathering * 1e3:.3f} ms; "
                f"update {own.updating * 1e3:.3f} ms"
            )


def _sum_of(parts: Mapping[str, float]) -> str:
    """Return the parts that are not zero as a sum in milliseconds."""
    return " + ".join(f"{name} {part * 1e3:.3f} ms" for name, part in parts.items() if part)


def step_time(config: RunConfig, world_size: int, cluster: Cluster) -> StepTime:
    """Predict the time of a step.

    Args:
        config: of the run, with its vocabulary size.
        world_size: ranks.
        cluster: that they run on.
    """
    step = _Step.of(config, world_size, cluster)
    count, ranks, parallel, costs, ends = step.microbatches, step.ranks, step.config.parallel, step.costs(), step.ends()
    end = pipeline_end(parallel, count, costs)
    apart = end if ranks == 1 else pipeline_end(parallel, count, replace(costs, transfer=0.0))
    done = max(at + own.reducing for at, own in zip(end.ends, ends))
    parts, sent, communicating = (dict.fromkeys(names, 0.0) for names in (PARTS, AXES, AXES))
    by_number = {id(stage): stage for stage in step.stages}
    for number, times in Counter(map(id, step.stages)).items():
        stage, share = by_number[number], times * count / ranks
        for (_, part), once in stage.spent.items():
            parts[part] += once * share
        for axis in AXES:
            sent[axis] += stage.sent[axis] * share
            communicating[axis] += stage.communicating[axis] * share
    messages = 2 * sum(one != other for one, other in pairwise(step.placement)) * count / ranks
    sent[PIPELINE] += messages * step.message
    communicating[PIPELINE] += messages * costs.transfer
    sent[DATA] += sum(own.sent for own in ends) / ranks
    communicating[DATA] += sum(own.communicating for own in ends) / ranks
    without = min(apart.makespan, end.makespan)
    parts[BUBBLE] += without - sum(apart.busy) / ranks
    parts[PIPELINE] += end.makespan - without
    parts[DATA] += done - end.makespan + max(own.gathering for own in ends)
    parts[OPTIMIZER] += max(own.updating for own in ends)
    samples = count * step.layout.sizes["dp"] * step.config.training.micro_batch_size
    return StepTime(parts, sent, communicating, costs, count, samples * step.config.training.seq_length, step)


def stage_costs(config: RunConfig, cluster: Cluster, stages: Sequence[StageLayers]) -> StageCosts:
    """Return the seconds of F, I and W by stage, without what replicas and messages between stages add."""
    forward, back, weight = zip(*(stage_times(config, cluster).of(stage).phases for stage in stages))
    return StageCosts(forward, back, weight)


def _takes(cluster: Cluster, each: Collective) -> float:
    """Return the seconds of equal collectives."""
    return each.times * seconds(cluster, each.operation, each.size, cluster.group(*each.ranks)) if each.times else 0.0


def _reductions(step: _Step, stage: StageTime) -> tuple[list[Collective], list[Collective]]:
    """Return the reductions of the gradients of a stage over shards, and of each shard over its copies."""
    parallel, wide = step.config.parallel, float(main_param_bytes(step.config))
    rounded = INT8_BYTES if parallel.grad_compression == "int8" else DTYPE_BYTES["bf16"]
    over_shards, over_copies = [], []
    for shards, copies, elements, buckets in _buckets(step, stage.parameters):
        part = elements / shards.size
        if parallel.grad_reduce_in_bf16 or parallel.grad_compression == "int8":
            over_shards.append(_over(shards, "all-to-all", elements * rounded, buckets))
            over_copies.append(_over(copies, "all-to-all", part * rounded, buckets))
            over_copies.append(_over(copies, "all-gather", part * rounded, buckets))
        else:
            over_shards.append(_over(shards, "reduce-scatter", elements * wide, buckets))
            over_copies.append(_over(copies, "all-reduce", part * wide * _compressed(step), buckets))
    return over_shards, over_copies


def _over(ranks: RankGroup, operation: str, size: float, buckets: int) -> Collective:
    """Return the collectives of buckets of ``size`` bytes together."""
    return Collective(DATA, operation, size / max(1, buckets), ranks, GRADIENTS, "", times=buckets * (ranks.size > 1))


def _compressed(step: _Step) -> float:
    """Return the share of the gradients that PowerSGD or top-k leaves."""
    compression = step.config.parallel.compression
    if compression is None or not compression.has_errors:
        return 1.0
    if compression.method == "topk":  # indices and values, of which every rank sends its own to each other one
        return compression.ratio * 2 * step.layout.sizes["dp"] / 2
    return 2.0 * compression.rank / step.config.model.hidden_size


def _gathers(step: _Step, parameters: Mapping[bool, float]) -> list[Collective]:
    """Return the gathers of weights."""
    width = DTYPE_BYTES[step.config.precision.params_dtype]
    groups = _buckets(step, parameters)
    return [_over(shards, "all-gather", elements * width, buckets) for shards, _, elements, buckets in groups]


def _buckets(step: _Step, parameters: Mapping[bool, float]) -> Iterator[tuple[RankGroup, RankGroup, float, int]]:
    """Yield shards, copies, elements and buckets of the parameters of experts and of the others."""
    parallel, sizes = step.config.parallel, step.layout.sizes
    limit = parallel.bucket_size(sizes["dp"] * sizes["cp"])
    for expert, elements in parameters.items():
        shards, copies = shards_of(parallel, step.layout, expert)
        stride = sizes["ep"] * sizes["etp"] if expert else sizes["tp"]
        yield RankGroup(shards, stride), RankGroup(copies, stride * shards), elements, ceil(elements / limit)


def _with_replicas(step: _Step, stage: StageTime) -> StageTime:
    """Return the costs of a stage with those that ZeRO-2, ZeRO-3 and offload add to every micro-batch."""
    parallel, cluster, time = step.config.parallel, step.cluster, StageTime()
    time.add(stage)
    weights, again = (
        _gathers(step, parameters) if parallel.reshards_after_forward else []
        for parameters in (merged(stage.parameters, stage.frozen), stage.in_blocks)
    )
    reductions = _reductions(step, stage)[0] if parallel.zero_stage >= 2 else []
    host = stage.offloaded / (cluster.accelerator.host.bandwidth * cluster.efficiency.link)
    for phase, messages in ((FORWARD, weights), (INPUT, again + reductions)):
        time.communicating[DATA] += sum(_takes(cluster, each) for each in messages)
        time.sent[DATA] += sum(each.sent for each in messages)
        time.spent[phase, DATA] += _hidden(cluster, messages, time, phase)
        time.spent[phase, OFFLOAD] += time.hide(phase, host)
    return time


@dataclass(frozen=True)
class _StepEnd:
    """Seconds of a pipeline rank at the end of a step."""

    # Reductions and gathers as far as they are not hidden, and the update.
    reducing: float
    gathering: float
    updating: float
    # Bytes that a rank sends, and seconds that it takes, hidden or not.
    sent: float
    communicating: float

    @classmethod
    def of(cls, step: _Step, stages: Iterable[StageTime]) -> _StepEnd:
        """Compute the end of a step, in which the last backward hides reductions, and the first forward gathers."""
        parallel, cluster, stage = step.config.parallel, step.cluster, StageTime()
        for each in stages:
            stage.add(each)
        over_shards, over_copies = _reductions(step, stage)
        reductions = over_copies if parallel.zero_stage >= 2 else over_shards + over_copies
        weights = {} if parallel.reshards_after_forward else merged(stage.parameters, stage.frozen)
        gathers = _gathers(step, weights)
        every = reductions + gathers
        return cls(
            reducing=_hidden(cluster, reductions, stage, INPUT if parallel.overlap_grad_reduce else ""),
            gathering=_hidden(cluster, gathers, stage, FORWARD if parallel.gathers_during_compute else ""),
            updating=_updating(step, stage),
            sent=sum(each.sent for each in every),
            communicating=sum(_takes(cluster, each) for each in every),
        )


def _hidden(cluster: Cluster, messages: Sequence[Collective], stage: StageTime, phase: str) -> float:
    """Return what messages cost that a phase hides, all but one; all of them for no phase."""
    takes = sum(_takes(cluster, each) for each in messages)
    if not phase:
        return takes
    bare = max((_takes(cluster, each._replace(times=1.0)) for each in messages if each.times), default=0.0)
    return bare + stage.hide(phase, takes - bare)


def _updating(step: _Step, stage: StageTime) -> float:
    """Return the seconds of the update of a rank's shards."""
    config, cluster = step.config, step.cluster
    optimizer, accelerator = config.optimizer, cluster.accelerator
    elements = sum(
        each / shards_of(config.parallel, step.layout, expert)[0] for expert, each in stage.parameters.items()
    )
    dtypes = {"exp_avg": optimizer.exp_avg_dtype, "exp_avg_sq": optimizer.exp_avg_sq_dtype}
    moments = sum(DTYPE_BYTES[dtypes.get(kind, "fp32")] for kind in state_kinds(optimizer.optimizer))
    per_element = UPDATE_BYTES + 2 * moments
    on_host = optimizer.optimizer_offload_fraction * optimizer.optimizer_cpu_offload
    device = (1 - on_host) * elements * per_element / (accelerator.bandwidth * cluster.efficiency.memory)
    moved = DTYPE_BYTES["fp32"] + DTYPE_BYTES[config.precision.params_dtype]
    transfers = on_host * elements * moved / (accelerator.host.bandwidth * cluster.efficiency.link)
    host = transfers + on_host * elements * per_element * cluster.node_size / HOST_UPDATE
    if optimizer.optimizer == "muon":
        flops = NEWTON_SCHULZ * optimizer.muon_num_ns_steps * config.model.hidden_size * elements
        device += flops / (accelerator.peak("bf16") * cluster.efficiency.matmul)
    norm = seconds(cluster, "all-reduce", 8.0, cluster.group(step.layout.world_size, 1))
    return device + host + norm


NEWTON_SCHULZ = 5
"""FLOPs of an iteration of Muon per element and row of a matrix ``[m, n]``: 4mmn + 2mmm, 4 to 6 (arXiv:2502.16982)."""


def step_timeline(config: RunConfig, microbatches: int, costs: StageCosts) -> Timeline:
    """Return the simulated timeline of a step."""
    parallel = resolve_pipeline(config.model, config.parallel)
    return simulate(build_program(parallel, microbatches), costs)
