"""Derive stages, schedule and program of a pipeline from its options, for configuration checks and for the run.

All functions raise ``ScheduleError`` for invalid options, with flags that fix them. Those without a ``model`` argument
expect the ``parallel`` options of a resolved configuration: the number of stages per rank may depend on the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.text import did_you_mean, divisors, flag, flag_fixes, nearest, nearest_multiples
from megatron.layers.mixers.registry import block_mixers
from megatron.layers.parameters import head_sizes, layer_sizes
from megatron.layers.recompute_plan import RecomputePlan
from megatron.pipeline.actions import PipelineSchedule, ScheduleError
from megatron.pipeline.communication import add_communication
from megatron.pipeline.partition import (
    LayerCosts,
    StageLayers,
    do_not_fill,
    expand_layout,
    format_layers,
    parse_layout,
    split_by_cost,
    split_by_rank,
    split_equally,
)
from megatron.pipeline.schedules import SCHEDULES, forward_only, make_schedule
from megatron.pipeline.search import SEARCHED, search_schedule
from megatron.pipeline.simulate import StageCosts, simulate
from megatron.pipeline.validate import PeakCounts, validate_program

DEFAULT_SCHEDULE, DEFAULT_VIRTUAL_SCHEDULE = "1f1b", "interleaved"
"""Default schedules with one stage per rank, and with several."""

SCHEDULE_SUFFIX = ".csv"
"""Suffix of a schedule file."""

MAX_PLANNED_ACTIONS = 1_000_000
"""Maximum stages x micro-batches of a step to plan, which takes seconds; more is a typing error."""

AUTO = "auto"
"""The layout that assigns layers by cost."""

MAX_IDLE = 0.03
"""Fraction of the ranks' time that unequal layers in equal numbers may cost over those by cost, by default."""

LAYER_SPLIT_OPTIONS = (
    ("pipeline_model_parallel_layout",),
    ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    (
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "num_layers_per_virtual_pipeline_stage",
    ),
)
"""Options that determine the split of layers; options from different lines exclude each other."""


def virtual_stages(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the stages on each pipeline rank (VPP) that the options give or the schedule requires, else 1."""
    given: dict[str, int] = {}
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        count = parallel.num_virtual_stages_per_pipeline_rank
        given[f"--num-virtual-stages-per-pipeline-rank {count}"] = count
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        size = parallel.num_layers_per_virtual_pipeline_stage
        given[f"--num-layers-per-virtual-pipeline-stage {size}"] = _stages_of_size(size, model, parallel)
    if parallel.pipeline_model_parallel_layout not in (None, AUTO):
        layout, ranks = str(parallel.pipeline_model_parallel_layout), parallel.pipeline_model_parallel_size
        stages = expand_layout(layout).count("|") + 1
        if stages % ranks:
            sizes = flag_fixes("--pipeline-model-parallel-size", nearest(ranks, divisors(stages)))
            raise ScheduleError(f"{layout} has {_stages(stages)}, which PP{ranks} cannot share equally", *sizes)
        given[f"--pipeline-model-parallel-layout '{layout}'"] = stages // ranks
    needed = required_virtual_stages(parallel)
    if needed is not None:
        given[f"--pipeline-schedule {parallel.pipeline_schedule}"] = needed
    one, first = next(iter(given.items()), ("", 1))
    for other, second in given.items():
        if second != first:
            sentence = f"{one} makes {_stages(first)} on each pipeline rank, and {other} makes {second}"
            raise ScheduleError(sentence, f"drop {one}", f"drop {other}")
    return first


def _stages(count: int) -> str:
    return "1 stage" if count == 1 else f"{count} stages"


def _stages_of_size(size: int, model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the stages per rank if each has ``size`` layers; an accounted-for embedding or output layer is one."""
    ranks, total = parallel.pipeline_model_parallel_size, _counted_layers(model, parallel)
    if total % (ranks * size):
        name = flag("num_layers_per_virtual_pipeline_stage")
        fits = divisors(total // ranks) if total % ranks == 0 else []
        sentence = f"{do_not_fill(total)} PP{ranks} with stages of {size}"
        raise ScheduleError(sentence, *flag_fixes(name, nearest(size, fits)), f"drop {name}")
    return total // (ranks * size)


def _counted_layers(model: ModelConfig, parallel: ParallelConfig) -> int:
    accounted = parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split
    return model.num_layers + sum(accounted)


def required_virtual_stages(parallel: ParallelConfig) -> int | None:
    """Return the stages per rank that the chosen schedule requires; None for no schedule or any number."""
    name = parallel.pipeline_schedule
    if name is None:
        return None
    if name.endswith(SCHEDULE_SUFFIX):
        schedule = _from_file(name)
        if len(schedule.ranks) != parallel.pipeline_model_parallel_size:
            sentence = f"{name} is for {len(schedule.ranks)} ranks, not PP{parallel.pipeline_model_parallel_size}"
            raise ScheduleError(sentence, f"--pipeline-model-parallel-size {len(schedule.ranks)}")
        held = [schedule.placement.count(rank) for rank in range(len(schedule.ranks))]
        if len(set(held)) > 1:
            rank = next(rank for rank, count in enumerate(held) if count != held[0])
            sentence = f"rank 0 has {_stages(held[0])} and rank {rank} has {held[rank]}"
            command = f"python tools/draw_schedule.py --schedule {name}"
            raise ScheduleError(f"{name}: {sentence}: all ranks need equally many", command)
        return held[0]
    names = (*SCHEDULES, SEARCHED)
    if name not in names:
        guess = did_you_mean(name.lower(), names)
        fixes = (f"--pipeline-schedule {known}" for known in ([guess] if guess else names))
        raise ScheduleError(
            f"there is no pipeline schedule {name}; the name of a schedule file ends in {SCHEDULE_SUFFIX}", *fixes
        )
    return None if name == SEARCHED else SCHEDULES[name].chunks


@lru_cache(maxsize=2)
def _from_file(name: str) -> PipelineSchedule:
    schedule = PipelineSchedule.load(Path(name))
    try:
        _ = schedule.placement
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error.sentence}", *error.fixes) from None
    return schedule


def resolve_pipeline(model: ModelConfig, parallel: ParallelConfig) -> ParallelConfig:
    """Return the options with the number of stages per rank and the schedule filled in."""
    count = virtual_stages(model, parallel)
    name = schedule_name(parallel, count)
    return replace(parallel, num_virtual_stages_per_pipeline_rank=count, pipeline_schedule=name)


def schedule_name(parallel: ParallelConfig, stages_per_rank: int) -> str:
    """Return the chosen schedule, by default 1F1B, or interleaved if a rank has several stages."""
    return parallel.pipeline_schedule or (DEFAULT_SCHEDULE if stages_per_rank == 1 else DEFAULT_VIRTUAL_SCHEDULE)


@lru_cache(maxsize=64)
def stage_placement(parallel: ParallelConfig, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of every stage, independent of the number of micro-batches."""
    name, ranks = schedule_name(parallel, stages_per_rank), parallel.pipeline_model_parallel_size
    if name.endswith(SCHEDULE_SUFFIX):
        return _from_file(name).placement
    if name == SEARCHED:
        there = tuple(range(ranks))
        return there + there[::-1] if stages_per_rank == 2 else there * stages_per_rank
    return _placement(name, ranks, stages_per_rank)


@lru_cache(maxsize=1024)
def _placement(name: str, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    return make_schedule(name, ranks, stages_per_rank, microbatches=1).placement


def stage_layers(model: ModelConfig, parallel: ParallelConfig, seq_length: int) -> tuple[StageLayers, ...]:
    """Return the layers of each stage in pipeline order.

    As the options say. Else equal numbers; by cost if these do not divide, or if layers differ and in equal numbers
    leave ranks idle for more than ``MAX_IDLE`` of the time over those by cost.
    """
    return _stage_layers(model, parallel, seq_length)[0]


def is_split_by_cost(model: ModelConfig, parallel: ParallelConfig, seq_length: int) -> bool:
    """Return True if the layers are split by cost, not equally or by an option."""
    return _stage_layers(model, parallel, seq_length)[1]


@lru_cache(maxsize=64)
def _stage_layers(
    model: ModelConfig, parallel: ParallelConfig, seq_length: int
) -> tuple[tuple[StageLayers, ...], bool]:
    """Return the layers of each stage, and whether they are split by cost."""
    flags = _split_flags(parallel)
    chunks, layers = virtual_stages(model, parallel), model.num_layers
    stages, layout = chunks * parallel.pipeline_model_parallel_size, parallel.pipeline_model_parallel_layout
    if stages > layers + 2:
        raise _unfilled(model, parallel, chunks)
    if layers > MAX_PLANNED_ACTIONS and stages > 1:
        raise ScheduleError(f"{layers:,} layers are more than can be split", f"--num-layers {MAX_PLANNED_ACTIONS}")
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if first is not None or last is not None:
        return split_by_rank(layers, stage_placement(parallel, chunks), first, last), False
    if layout not in (None, AUTO):
        return parse_layout(str(layout), layers, len(model.head_layers)), False
    embedding, output = parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split
    even = split_equally(layers, stages, embedding, output) if layout is None else None
    if even is None and (embedding or output):
        raise _unfilled(model, parallel, chunks)
    costs = layer_costs(model, seq_length)
    if even is not None and (flags or stages == 1 or costs.alike):
        return even, False
    placement = stage_placement(parallel, chunks)
    by_cost = split_by_cost(placement, costs)
    if even is None:
        return by_cost, True
    # The share of its time in which a rank computes, in the long run.
    mean = sum(map(costs.of, by_cost)) / parallel.pipeline_model_parallel_size
    busy, most = (mean / max(costs.of_ranks(split, placement)) for split in (even, by_cost))
    return (by_cost, True) if most - busy > MAX_IDLE else (even, False)


def _split_flags(parallel: ParallelConfig) -> list[str]:
    """Return the flags that determine the split of layers, the first of each line of ``LAYER_SPLIT_OPTIONS``."""
    given = [[flag(name) for name in names if getattr(parallel, name)] for names in LAYER_SPLIT_OPTIONS]
    flags = [names[0] for names in given if names]
    if len(flags) > 1:
        sentence = f"{flags[0]} and {flags[1]} both determine the split of layers"
        raise ScheduleError(sentence, f"drop {flags[0]}", f"drop {flags[1]}")
    return flags


def _unfilled(model: ModelConfig, parallel: ParallelConfig, chunks: int) -> ScheduleError:
    """Return the error for layers that neither divide over the stages nor may be split by cost."""
    ranks, total = parallel.pipeline_model_parallel_size, _counted_layers(model, parallel)
    stages, accounted = ranks * chunks, total - model.num_layers
    what = do_not_fill(model.num_layers)
    if accounted:
        counting = "1 that counts" if accounted == 1 else f"{accounted} that count"
        what = f"{format_layers(model.num_layers)} and {counting} as one do not fill"
    sentence = f"{what} PP{ranks} x VPP{chunks} ({stages} stages x {total / stages:.4g})"
    if accounted:
        fix = "--no-account-for-embedding-in-pipeline-split --no-account-for-loss-in-pipeline-split"
        enough = [n - accounted for n in nearest_multiples(total, stages) if n > accounted]
        return ScheduleError(sentence, fix, *flag_fixes("--num-layers", enough))
    most = model.num_layers + 2
    fewer = [min(chunks - 1, most // ranks)] if required_virtual_stages(parallel) is None else []
    shorter = [n for n in divisors(ranks) if n * chunks <= most]
    fixes = flag_fixes("--num-virtual-stages-per-pipeline-rank", [n for n in fewer if n > 0])
    fixes += flag_fixes("--pipeline-model-parallel-size", shorter[-1:])
    return ScheduleError(sentence, *fixes, f"--num-layers {stages - 2}")


@lru_cache(maxsize=8)
def layer_costs(model: ModelConfig, seq_length: int) -> LayerCosts:
    """Return the costs of the parts of a model, in weights that are multiplied (6 FLOPs per token each).

    Embeddings are looked up and cost nothing. While the vocabulary size is unknown the output layer costs nothing. If
    the blocks have different mixers, products without a weight count too, such as scores of attention over samples of
    ``seq_length`` tokens. Otherwise the costs do not depend on it.
    """
    depths, heads = len(model.head_layers), head_sizes(model, active=True)
    heads *= depths // max(1, len(heads))
    output = (1 + depths) * (model.vocab_size or 0) * model.hidden_size  # each head uses the output layer, too
    layers = layer_sizes(model, active=True)
    kinds = [model.mixers(layer) for layer in range(model.num_layers)]
    if len({*kinds}) > 1:
        layers = [size + _without_weight(model, layer, seq_length) for layer, size in enumerate(layers)]
        output += sum(_without_weight(model, layer, seq_length) for layer in model.head_layers)
    return LayerCosts(tuple(layers), 0, sum(heads) + output)


def _without_weight(model: ModelConfig, layer: int, seq_length: int) -> int:
    """Return the products of activations with each other in a block, in the unit of :func:`layer_costs`."""
    plan, keys = RecomputePlan(), model.pattern(layer).mean_keys(seq_length)
    products = (each for mixer in block_mixers(model, layer) for each in mixer.matmuls(model, plan, keys).values())
    return round(sum(each.flops for each in products if not each.of_weight) / 2)


def stage_costs(model: ModelConfig, stages: Sequence[StageLayers], seq_length: int) -> tuple[int, ...]:
    """Return the cost of each stage, in the unit of :func:`layer_costs`."""
    return tuple(map(layer_costs(model, seq_length).of, stages))


_search = cache(search_schedule)


def build_schedule(parallel: ParallelConfig, microbatches: int) -> PipelineSchedule:
    """Return the schedule of a step with ``microbatches`` micro-batches on each data-parallel rank."""
    chunks, ranks = parallel.num_virtual_stages_per_pipeline_rank, parallel.pipeline_model_parallel_size
    name = schedule_name(parallel, chunks or 1)
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage if name == DEFAULT_VIRTUAL_SCHEDULE else None
    if name.endswith(SCHEDULE_SUFFIX):
        schedule = _from_file(name)
        if schedule.microbatches != microbatches:
            raise ScheduleError(f"{name} is for {schedule.microbatches} micro-batches in a step, not {microbatches}")
        return schedule
    if microbatches > _most_microbatches(parallel):
        raise ScheduleError(f"{microbatches:,} micro-batches in a step are too many to plan for so many stages")
    if name == SEARCHED:
        # For stages of equal cost, in the memory of 1F1B.
        placement = stage_placement(parallel, chunks or 1)
        costs, limit = StageCosts.uniform(len(placement)), len(placement)
        return _search(ranks, len(placement) // ranks, microbatches, costs, limit, placement)
    return make_schedule(name, ranks, chunks or SCHEDULES[name].chunks or 1, microbatches, group)


def nearest_num_microbatches(parallel: ParallelConfig, microbatches: int) -> int:
    """Return the nearest number of micro-batches per step that the schedule supports."""
    name = schedule_name(parallel, 1)
    if name.endswith(SCHEDULE_SUFFIX):
        return _from_file(name).microbatches
    return min(microbatches, _most_microbatches(parallel))


def _most_microbatches(parallel: ParallelConfig) -> int:
    chunks = parallel.num_virtual_stages_per_pipeline_rank or 1
    return max(1, MAX_PLANNED_ACTIONS // (chunks * parallel.pipeline_model_parallel_size))


def build_program(parallel: ParallelConfig, microbatches: int, evaluation: bool = False) -> PipelineSchedule:
    """Return the schedule with its communication, proven free of deadlock; for an ``evaluation`` forwards only."""
    return validated_program(parallel, microbatches, evaluation)[0]


@cache
def peak_counts(parallel: ParallelConfig, microbatches: int) -> PeakCounts:
    """Return the maximum that each rank holds in such a step."""
    return validated_program(parallel, microbatches, False)[1]


@lru_cache(maxsize=4)
def validated_program(
    parallel: ParallelConfig, microbatches: int, evaluation: bool
) -> tuple[PipelineSchedule, PeakCounts]:
    """Return a validated program and the maximum that each rank holds in it; arguments as for :func:`build_program`."""
    if evaluation:
        placement = stage_placement(parallel, parallel.num_virtual_stages_per_pipeline_rank or 1)
        program = add_communication(forward_only(placement, microbatches))
    else:
        program = add_communication(build_schedule(parallel, microbatches))
    return program, validate_program(program, evaluation=evaluation)


@cache
def simulated_bubble(parallel: ParallelConfig, microbatches: int, costs: tuple[float, ...] | None = None) -> float:
    """Return the simulated fraction of all ranks' time, 0 to 1, in which they are idle.

    Args:
        parallel: of a resolved configuration.
        microbatches: of a step, on each data-parallel rank.
        costs: of every stage, in any unit; None for equal costs. Forward, input gradients and weight gradients take one
            cost each; communication takes no time.
    """
    program = build_program(parallel, microbatches)
    seconds = costs or (1,) * program.stages
    return simulate(program, StageCosts(seconds, seconds, seconds)).bubble
