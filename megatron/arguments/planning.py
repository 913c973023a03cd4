"""The planner on the command line: the layout of ``--plan auto``, and the forecast of a run's time.

A layout is planned where the command line is merged, before its values are checked: options that are given stay, and
the planner chooses the others. Every rank does this alone, from the same flags and files. Does not import torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from megatron.arguments.compatibility import StoredLayout, StoredLayoutReader, readable_config
from megatron.arguments.hardware import CPU, find_cluster
from megatron.arguments.sources import resolve
from megatron.arguments.validate import find_problems
from megatron.config.batch import final_consumed_samples, final_iteration
from megatron.config.errors import Problem
from megatron.config.machine import gpu_name
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.config.text import format_bytes
from megatron.data.dataset_info import resolve_vocab_size
from megatron.planner.flops import FlopsPerToken
from megatron.planner.hardware import Cluster, accelerators
from megatron.planner.layouts import CHOSEN, NO_OFFLOAD, apply
from megatron.planner.search import LayoutSearch, Plan
from megatron.planner.step_time import step_time

PLANNED = frozenset(CHOSEN)
"""Options that the planner may choose."""


@dataclass(frozen=True)
class PlannedLayout:
    """The outcome of ``--plan auto``."""

    # With the options that the planner chose.
    config: RunConfig
    # Problems and notes.
    findings: tuple[Problem | str, ...] = ()
    # Options without a value, because no layout was found: nothing that depends on them can be checked.
    undecided: frozenset[str] = frozenset()


def plan_layout(
    config: RunConfig,
    world_size: int,
    given: Collection[str],
    found: Collection[Problem] = (),
    stored: StoredLayoutReader = lambda options: None,
    environ: Mapping[str, str] = os.environ,
) -> PlannedLayout:
    """Choose the layout of a run.

    Args:
        config: of the run.
        world_size: number of ranks.
        given: fields that were set, which keep their values; nothing is planned if they are all, as in the file of a
            run that was planned.
        found: problems so far; with any, and with others that no layout would mend, nothing is planned.
        stored: reads the layout of the run that is resumed.
        environ: of this rank.

    Raises:
        DataError: if the vocabulary size is unknown.
    """
    free = PLANNED - {*given}
    if not free or found or find_problems(config, world_size, free):  # the caller reports them
        return PlannedLayout(config, (), free)
    notes = []
    if (before := stored(config.resume_options)) is not None:
        again = _kept(config, world_size, before, free)
        if isinstance(again, RunConfig):
            return PlannedLayout(again, (f"plan: kept from {before.checkpoint}: {layout_flags(again, free)}",))
        notes.append(again)
    if (cluster := find_cluster(config, world_size, environ)) is None:
        return PlannedLayout(config, (_unknown_gpu(gpu_name() or "none"),), free)
    vocabulary = resolve_vocab_size(config.data, config.model.vocab_size)
    whole = replace(config, model=replace(config.model, vocab_size=vocabulary))
    known = replace(whole, model=resolve(whole, world_size).model)
    kept = {*given}
    if cluster.accelerator.name == CPU:
        known = replace(known, training=replace(known.training, device="cpu"))
        kept |= {*NO_OFFLOAD}  # the memory of a CPU is that of its host
    search = LayoutSearch(known, world_size, cluster, find_problems, frozenset(kept))
    plans = search.best(2)
    if not plans:
        return PlannedLayout(config, (*notes, nothing_fits(search, _start, "--plan auto")), free)
    chosen = apply(config, plans[0].chosen)
    line = describe(plans[0], plans[1:], cluster, world_size)
    if (gap := search.may_be_beaten_by(plans[0])) > 0:
        line += f"; the search was cut short, and another layout may be up to {gap:.0%} faster"
    return PlannedLayout(chosen, (*notes, line))


def describe(plan: Plan, others: Iterable[Plan], cluster: Cluster, world_size: int) -> str:
    """Return a line on the plan that was chosen, and how much slower the next one is."""
    size, capacity = sum(plan.memory.values()), cluster.accelerator.memory
    ranks = "1 rank" if world_size == 1 else f"{world_size:,} ranks"
    line = f"plan for {ranks} on {cluster.accelerator.name}: {' '.join(plan.flags) or 'the defaults'}: "
    if cluster.accelerator.name != CPU:
        line += f"{plan.time.seconds:.3g} s a step, "
    line += f"{format_bytes(size)} of {format_bytes(capacity)}"
    for other in others:
        slower = f"{other.time.seconds / plan.time.seconds - 1:+.1%}"
        line += f"; next {' '.join(other.flags) or 'the defaults'} ({slower})"
    return line


def _kept(config: RunConfig, world_size: int, before: StoredLayout, free: Collection[str]) -> RunConfig | str:
    """Return the configuration with the layout of a checkpoint, or why it is planned again."""
    saved = readable_config(before.config)
    if saved.planning.plan is None:
        return f"plan: {before.checkpoint} has a layout that was given by flags: it is planned now"
    if before.world_size != world_size:
        return f"plan: {before.checkpoint} was written by {before.world_size} ranks: planned again for {world_size}"
    kept = apply(config, {name: SETTINGS[name].value_in(saved) for name in sorted(free)})
    if problems := find_problems(kept, world_size):
        return f"plan: the layout of {before.checkpoint} is planned again: {problems[0].sentence}"
    return kept


def layout_flags(config: RunConfig, names: Collection[str] = PLANNED) -> str:
    """Return the flags of the options of the layout that differ from their defaults."""
    values = {name: SETTINGS[name].value_in(config) for name in SETTINGS if name in names}
    flags = [SETTINGS[name].spell(value) for name, value in values.items() if value != SETTINGS[name].default]
    return " ".join(flags) or "the defaults"


def nothing_fits(search: LayoutSearch, larger: Callable[[int], str], of: str = "") -> Problem:
    """Return a problem with what is missing and what would fit, or with why all layouts are refused.

    Args:
        search: that found no plan.
        larger: returns what starts the run on so many ranks.
        of: flag that asked for a plan, to begin the sentence.
    """
    accelerator, ranks = search.cluster.accelerator, search.world_size
    counted, short, of = "1 rank" if ranks == 1 else f"{ranks:,} ranks", search.shortfall(), f"{of}: " if of else ""
    if short is None:
        refused = [*find_problems(search.space.start, ranks)]
        why = refused[0].sentence if refused else "no choice of the planner goes with the given flags"
        return Problem("E962", f"{of}{counted} can have no layout: {why}", refused[0].fixes if refused else ())
    fixes = (*([larger(short.ranks)] if short.ranks else []), *(f"drop {flag}" for flag in short.dropped))
    memory = f"{format_bytes(accelerator.memory)} of memory{'' if ranks == 1 else ' each'} ({accelerator.name})"
    return Problem("E962", f"{of}no layout fits into {counted} with {memory}: {short}", fixes)


def _start(ranks: int) -> str:
    return f"torchrun --nproc-per-node {ranks}" if ranks <= 8 else f"start {ranks} ranks"


def _unknown_gpu(name: str) -> Problem:
    sentence = f"--plan auto: the GPU of this machine is {name}, which is not in the planner's table"
    return Problem("E961", sentence, (f"--plan-gpu {'|'.join(accelerators())}", "--plan-gpu FILE.yaml"))


def forecast(config: RunConfig, world_size: int, cluster: Cluster, iteration: int, consumed_samples: int) -> str:
    """Return the row of the summary with the expected time of a step, and when the run ends.

    Args:
        config: with the vocabulary size.
        world_size: number of ranks.
        cluster: that they run on.
        iteration: steps taken before.
        consumed_samples: samples used before.
    """
    expected = step_time(config, world_size, cluster)
    dp = config.parallel.data_parallel_size(world_size)
    position = iteration, consumed_samples
    steps = final_iteration(config.training, dp, *position) - iteration
    samples = final_consumed_samples(config.training, dp, *position) - consumed_samples
    rate = expected.tokens / expected.seconds
    left = samples * config.training.seq_length / rate
    peak = cluster.accelerator.peak("bf16") * world_size
    flops = FlopsPerToken.from_config(resolve(config, world_size))
    ends = time.strftime("%Y-%m-%d %H:%M", time.gmtime(time.time() + left))
    return (
        f"{expected.seconds:.3g} s a step on {cluster.accelerator.name}, {rate:,.0f} tokens/s, "
        f"MFU {flops.full * rate / peak:.1%}; the {steps:,} steps take {_duration(left)}, to {ends} UTC, "
        "without evaluations and saves"
    )


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds"
