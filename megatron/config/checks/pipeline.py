"""Whether the layers fill the stages of the pipeline, and its schedule can run every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from megatron.config.batch import batch_stages, microbatches
from megatron.config.checks.batch import share
from megatron.config.numbers import offers
from megatron.config.parallel import ParallelConfig
from megatron.config.problems import Problem
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.pipeline import plan
from megatron.pipeline.actions import ScheduleError
from megatron.pipeline.partition import AUTO, written


def stages(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """There is such a schedule, the options agree on the stages of a rank, and the layers fill them."""
    model, parallel = config.model, config.parallel
    layout = parallel.pipeline_model_parallel_layout
    problem = _told("E208", plan.stages_of_schedule, parallel)
    if layout not in (None, plan.AUTO):
        problem = problem or _told("E210", written, layout, model.num_layers)
    problem = problem or _told("E209", plan.virtual_stages, model, parallel)
    if problem:
        yield problem
        return
    known = plan.resolved(model, parallel)
    if known.pipeline_schedule != plan.SEVERAL_STAGES:  # of which the checks of idle options tell
        known = replace(known, microbatch_group_size_per_virtual_pipeline_stage=None)
    unfilled = _told("E210", plan.stage_layers, model, known)
    unable = None if unfilled else _told("E208", plan.peaks_for, known, plan.nearest_microbatches(known, 1))
    if unable and str(known.pipeline_schedule).endswith(plan.FILE):
        unable = replace(unable, sentence=f"{known.pipeline_schedule}: {unable.sentence}")
    yield from filter(None, (unfilled, unable))


def batches(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Every batch of the run, on the way of a ramp too, is one that the schedule can run."""
    parallel = _running(config)
    if parallel is None or world_size % parallel.model_ranks:
        return
    t, unit = config.training, share(config, world_size)
    ranks = parallel.data_parallel_size(world_size)
    ramp = batch_stages(t, ranks)
    for sample, size in ramp:
        count = microbatches(t, ranks, size)
        if not count or (size % unit and not t.pad_global_batch):  # of which the checks of batches tell
            continue
        full = sample == ramp[-1][0]
        problem = _told("E211", plan.peaks_for, parallel, count)
        if problem is None and full and t.eval_iters:
            problem = _told("E211", plan.program_for, parallel, count, True)
        if problem:
            batch = f"global batch {size}" + (f" from sample {sample:,} on" if len(ramp) > 1 else "")
            near = offers("--global-batch-size", [plan.nearest_microbatches(parallel, count) * unit] if full else [])
            fixes = (*near, "drop --rampup-batch-size") if len(ramp) > 1 else near
            yield replace(problem, sentence=f"{batch}: {problem.sentence}", fixes=fixes)
            return


def _running(config: RunConfig) -> ParallelConfig | None:
    """The pipeline's options written out, of one that :func:`stages` has nothing to say about."""
    try:
        parallel = plan.resolved(config.model, config.parallel)
        plan.stage_layers(config.model, parallel)
        plan.peaks_for(parallel, plan.nearest_microbatches(parallel, 1))
    except ScheduleError:
        return None
    return parallel


def _told(code: str, ask: Callable[..., object], *what: object) -> Problem | None:
    try:
        ask(*what)
    except ScheduleError as error:
        return Problem(code, error.sentence, error.fixes)
    return None


def remarks(config: RunConfig, world_size: int) -> Iterator[str]:
    """A line on layers that are dealt out unevenly or at a cost, and on a schedule that has nothing to save."""
    model, parallel = config.model, plan.resolved(config.model, config.parallel)
    chunks, name = parallel.num_virtual_stages_per_pipeline_rank or 1, parallel.pipeline_schedule
    ranks = parallel.pipeline_model_parallel_size
    if plan.dealt_by_cost(model, parallel) and parallel.pipeline_model_parallel_layout is None:
        yield f"{model.num_layers} layers do not divide over {ranks * chunks} stages: dealt out as {AUTO} does, by cost"
    if ranks > 1 and name == plan.SEVERAL_STAGES and chunks == 1:
        yield "--pipeline-schedule interleaved at VPP 1 waits as long as 1f1b and keeps more"
    if ranks == 1 and (chunks > 1 or name != plan.ONE_STAGE):
        yield f"a pipeline of 1 rank waits for nobody: {_typed(config.parallel)} makes no step shorter"
    if ranks > 1 and model.vocab_size is not None:
        yield from _dearer(config, parallel, world_size)


ASKING = (
    "pipeline_schedule",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
)
"""Options that may ask for several stages or for an order."""


def _typed(parallel: ParallelConfig) -> str:
    """The options of a pipeline that were set, as flags; there is one, or it had a single stage and 1F1B."""
    said = [(SETTINGS[name], getattr(parallel, name)) for name in ASKING]
    return " with ".join(setting.spell(value) for setting, value in said if value is not None)


WORTH_TELLING = 0.03
"""Of the ranks' time: what the layout by cost must save before it is named."""


def _dearer(config: RunConfig, parallel: ParallelConfig, world_size: int) -> Iterator[str]:
    """A line on equally many layers in every stage where their cost makes all wait for the costliest rank."""
    model = config.model
    if plan.dealt_by_cost(model, parallel) or any(getattr(parallel, name) for way in plan.WAYS for name in way):
        return
    by_cost = plan.stage_layers(model, replace(parallel, pipeline_model_parallel_layout=plan.AUTO))
    equal = plan.stage_costs(model, plan.stage_layers(model, parallel))
    count = microbatches(config.training, parallel.data_parallel_size(world_size))
    before, after = (plan.bubble_of(parallel, count, costs) for costs in (equal, plan.stage_costs(model, by_cost)))
    if before - after > WORTH_TELLING:
        yield f"{AUTO} makes the bubble {after:.1%} instead of {before:.1%}, as these stages cost"


CHECKS = (stages, batches)
