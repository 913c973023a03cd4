"""Checks of the pipeline's schedule and stages, for every batch of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from megatron.arguments.checks.training import batch_multiple
from megatron.config.batch import batch_size_stages, get_num_microbatches
from megatron.config.errors import Problem
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.pipeline import plan
from megatron.pipeline.actions import ScheduleError
from megatron.pipeline.partition import AUTO, parse_layout

STAGE_OPTIONS = (
    "pipeline_schedule",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
)
"""Options that set several stages per rank or a schedule."""

MIN_BUBBLE_GAIN = 0.03
"""Smallest gain of the layout by cost, as a fraction of the ranks' time, that is worth a note."""


def check_stages(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the schedule exists, the options agree on the stages, and every stage has layers."""
    model, parallel = config.model, config.parallel
    layout = parallel.pipeline_model_parallel_layout
    problem = _schedule_problem("E208", plan.required_virtual_stages, parallel)
    if layout not in (None, plan.AUTO):
        problem = problem or _schedule_problem("E210", parse_layout, layout, model.num_layers, len(model.head_layers))
    problem = problem or _schedule_problem("E209", plan.virtual_stages, model, parallel)
    if problem:
        yield problem
        return
    known = plan.resolve_pipeline(model, parallel)
    if known.pipeline_schedule != plan.DEFAULT_VIRTUAL_SCHEDULE:  # reported as an unused option
        known = replace(known, microbatch_group_size_per_virtual_pipeline_stage=None)
    problem = _schedule_problem("E210", plan.stage_layers, model, known, config.training.seq_length)
    if problem is None:
        problem = _schedule_problem("E208", plan.peak_counts, known, plan.nearest_num_microbatches(known, 1))
        if problem and str(known.pipeline_schedule).endswith(plan.SCHEDULE_SUFFIX):
            problem = replace(problem, sentence=f"{known.pipeline_schedule}: {problem.sentence}")
    if problem:
        yield problem


def check_batches(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the schedule can run every batch of the run, including those of a ramp."""
    try:
        parallel = plan.resolve_pipeline(config.model, config.parallel)
        plan.stage_layers(config.model, parallel, config.training.seq_length)
        plan.peak_counts(parallel, plan.nearest_num_microbatches(parallel, 1))
    except ScheduleError:  # reported by check_stages
        return
    if world_size % parallel.model_ranks:
        return
    training = config.training
    unit = batch_multiple(config, world_size)
    ranks = parallel.data_parallel_size(world_size)
    ramp = batch_size_stages(training, ranks)
    for sample, size in ramp:
        count = get_num_microbatches(training, ranks, size)
        if not count or (size % unit and not training.pad_global_batch):  # reported by the batch checks
            continue
        full = sample == ramp[-1][0]
        problem = _schedule_problem("E211", plan.peak_counts, parallel, count)
        if problem is None and full and training.eval_iters:
            problem = _schedule_problem("E211", plan.build_program, parallel, count, True)
        if problem:
            batch = f"global batch {size}" + (f" from sample {sample:,} on" if len(ramp) > 1 else "")
            near = (f"--global-batch-size {plan.nearest_num_microbatches(parallel, count) * unit}",) if full else ()
            fixes = (*near, "drop --rampup-batch-size") if len(ramp) > 1 else near
            yield replace(problem, sentence=f"{batch}: {problem.sentence}", fixes=fixes)
            return


def _schedule_problem(code: str, function: Callable[..., object], *arguments: object) -> Problem | None:
    try:
        function(*arguments)
    except ScheduleError as error:
        return Problem(code, error.sentence, error.fixes)
    return None


def pipeline_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield notes about uneven or costly stages and about schedules without a benefit."""
    model = config.model
    parallel = plan.resolve_pipeline(model, config.parallel)
    chunks = parallel.num_virtual_stages_per_pipeline_rank or 1
    name = parallel.pipeline_schedule
    ranks = parallel.pipeline_model_parallel_size
    by_cost = plan.is_split_by_cost(model, parallel, config.training.seq_length)
    if by_cost and parallel.pipeline_model_parallel_layout is None:
        divide = model.num_layers % (ranks * chunks) == 0
        why = "differ in cost" if divide else f"do not divide over {ranks * chunks} stages"
        yield f"{model.num_layers} layers {why}: they are distributed by cost, as with {AUTO}"
    if ranks > 1 and name == plan.DEFAULT_VIRTUAL_SCHEDULE and chunks == 1:
        yield "--pipeline-schedule interleaved with VPP 1 has the same bubble as 1f1b and keeps more activations"
    if ranks == 1 and (chunks > 1 or name != plan.DEFAULT_SCHEDULE):
        given = (SETTINGS[name] for name in STAGE_OPTIONS)
        flags = [setting.spell(value) for setting in given if (value := setting.value_in(config)) is not None]
        yield f"{' with '.join(flags)} has no effect with --pipeline-model-parallel-size 1"
    if ranks > 1 and model.vocab_size is not None:
        yield from _unbalanced_note(config, parallel, world_size)


def _unbalanced_note(config: RunConfig, parallel: ParallelConfig, world_size: int) -> Iterator[str]:
    """Yield a note if the layout by cost has a much smaller bubble than equal numbers of layers."""
    model, length = config.model, config.training.seq_length
    if plan.is_split_by_cost(model, parallel, length) or any(
        getattr(parallel, name) for group in plan.LAYER_SPLIT_OPTIONS for name in group
    ):
        return
    by_cost = plan.stage_layers(model, replace(parallel, pipeline_model_parallel_layout=plan.AUTO), length)
    equal = plan.stage_costs(model, plan.stage_layers(model, parallel, length), length)
    count = get_num_microbatches(config.training, parallel.data_parallel_size(world_size))
    before = plan.simulated_bubble(parallel, count, equal)
    after = plan.simulated_bubble(parallel, count, plan.stage_costs(model, by_cost, length))
    if before - after > MIN_BUBBLE_GAIN:
        yield f"{AUTO} reduces the bubble from {before:.1%} to {after:.1%}"
