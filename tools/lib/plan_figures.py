"""Pictures of a plan: memory by pipeline rank, memory against time, the timeline of a step, and sensitivity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.batch import get_num_microbatches
from megatron.config.text import format_compact
from megatron.pipeline.plan import resolve_pipeline
from megatron.pipeline.simulate import Timeline
from megatron.planner.communication import AXES
from megatron.planner.report import MEMORY_PARTS, PlanReport, format_swept, title
from megatron.planner.search import Plan
from megatron.planner.sensitivity import SWEPT, SweepPoint
from megatron.planner.step_time import PARTS, step_timeline
from megatron.planner.timeline import IDLE_COLOR, LIMIT_COLOR, POINTS_PER_INCH, ROW_HEIGHT, draw_work, work_legend
from megatron.training.loggers.plots import MUTED_COLOR, RUN_COLORS, open_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PART_COLORS: Mapping[str, str] = dict(zip((*MEMORY_PARTS, "other"), ("#1e3a8a", "#3b82f6", "#93c5fd", *RUN_COLORS[1:])))
"""Of the parts of memory; the state of the model is blue."""

STEP_COLORS: Mapping[str, str] = dict(
    zip(PARTS, ("#17407f", "#7aa2d8", IDLE_COLOR, *RUN_COLORS[1:5], "#dc2626", "#a16207", "#4ade80"), strict=True)
)
WIDTH, MARGIN = 13.0, 1.3
"""Inches of the picture, and of what is left and right of a panel of its width."""
DRAWN_MICROBATCHES = 32
"""Most micro-batches of a timeline that are drawn, unless the pipeline needs more to fill."""
LONGEST_NAME = 0.045
"""Smallest share of a step whose part has its name in the bar."""


def draw_plan(report: PlanReport, out: Path) -> None:
    """Draw all panels. Raises as :func:`open_figure`."""
    best = report.plans[0]
    timeline, drawn, count = step_of(best, report.search.world_size)
    rows = min(24, len(timeline.intervals)) * ROW_HEIGHT + 1.1
    heights = (4.0, 1.2, rows, 3.0)
    with open_figure(out, WIDTH, sum(heights) + 0.4) as figure:
        figure.suptitle(title(report), x=0.01, ha="left", fontweight="bold")
        above, step, pipeline, below = figure.subfigures(4, 1, squeeze=False, height_ratios=heights)[:, 0]
        memory, frontier = above.subplots(1, 2)
        draw_memory(memory, report)
        draw_frontier(frontier, report)
        draw_step(step.subplots(), best)
        draw_pipeline(pipeline.subplots(), timeline, drawn, count)
        for axes, axis in zip(below.subplots(1, 3), SWEPT, strict=True):
            draw_sweep(axes, report, axis)


def draw_memory(axes: Axes, report: PlanReport) -> None:
    """Draw the memory of every pipeline rank by part, and what fits."""
    ranks = range(len(report.memory))
    below = [0.0] * len(ranks)
    for name, color in PART_COLORS.items():
        sizes = [parts[name] / 2**30 for parts in report.memory]
        if max(sizes) >= 0.01:
            axes.bar(ranks, sizes, 0.8, below, color=color, label=name)
        below = [start + size for start, size in zip(below, sizes)]
    device = report.search.cluster.accelerator.memory / 2**30
    axes.axhline(report.search.capacity / 2**30, color=LIMIT_COLOR, label=f"fits: {report.search.capacity / 2**30:.1f}")
    axes.axhline(device, color=LIMIT_COLOR, linestyle="--", label=f"device: {device:.1f}")
    axes.set_xticks(ranks[:: 1 + len(ranks) // 16])
    axes.set_xlim(-0.6, max(1, len(ranks)) - 0.4)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("pipeline rank")
    axes.set_ylabel("GiB")
    axes.set_title("memory at the peak of a step", loc="left", fontsize=10)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), reverse=True)


def draw_frontier(axes: Axes, report: PlanReport) -> None:
    """Draw seconds of a step over memory: the plans of other grids, single changes of the best, and the frontier."""
    plans = report.plans
    changed = [each.plan for each in report.neighbours if each.plan is not None]
    for label, some, color in (
        ("one choice changed", changed, MUTED_COLOR),
        ("fastest of each grid of ranks", plans, RUN_COLORS[0]),
    ):
        axes.plot([p.bytes / 2**30 for p in some], [p.time.seconds for p in some], "o", color=color, ms=4, label=label)
    frontier = pareto([plan for plan in (*plans, *changed) if report.search.fits(plan)])
    edge = [p.bytes / 2**30 for p in frontier], [p.time.seconds for p in frontier]
    axes.step(*edge, color=RUN_COLORS[1], where="post", label="no other is smaller and faster")
    best = report.plans[0]
    axes.plot([best.bytes / 2**30], [best.time.seconds], "*", color=RUN_COLORS[1], ms=14, label="plan 1")
    axes.axvline(report.search.capacity / 2**30, color=LIMIT_COLOR, linewidth=1.2)
    times = [p.time.seconds for p in (*plans, *changed)]
    axes.set_ylim(0.97 * min(times), min(1.03 * max(times), 2.5 * best.time.seconds))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("GiB on the fullest rank")
    axes.set_ylabel("seconds of a step")
    axes.set_title("memory against time", loc="left", fontsize=10)
    axes.legend(fontsize=8, loc="best", frameon=True)


def pareto(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans than which no other is both smaller and faster, the smallest first."""
    found: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.bytes, plan.time.seconds)):
        if not found or plan.time.seconds < found[-1].time.seconds:
            found.append(plan)
    return found


def draw_step(axes: Axes, plan: Plan) -> None:
    """Draw the parts of a step in a bar."""
    start = 0.0
    for part in PARTS:
        seconds = plan.time.parts[part]
        share = seconds / plan.time.seconds
        if share >= 0.001:
            label = f"{part}: {seconds:.3g} s"
            axes.barh([0], [seconds], left=start, color=STEP_COLORS[part], edgecolor="white", label=label)
        start += seconds
    axes.set_xlim(0, plan.time.seconds)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("seconds")
    hidden = "; of communication, what nothing hides" * any(plan.time.parts[axis] for axis in AXES)
    axes.set_title(f"a step: {plan.time.seconds:.3f} s{hidden}", loc="left", fontsize=10)
    axes.legend(fontsize=8, ncols=len(PARTS), loc="lower right", bbox_to_anchor=(1, 1))


def step_of(plan: Plan, world_size: int) -> tuple[Timeline, int, int]:
    """Return the timeline of a step, how many micro-batches it has, and how many a step has."""
    config = replace(plan.config, parallel=resolve_pipeline(plan.config.model, plan.config.parallel))
    count = get_num_microbatches(config.training, config.parallel.data_parallel_size(world_size))
    ranks = config.parallel.pipeline_model_parallel_size
    drawn = min(count, ranks * max(2, math.ceil(DRAWN_MICROBATCHES / ranks)))
    return step_timeline(config, drawn, plan.time.stages), drawn, count


def draw_pipeline(axes: Axes, timeline: Timeline, drawn: int, count: int) -> None:
    """Draw what every pipeline rank computes."""
    axes.grid(visible=False)
    draw_work(axes, timeline, (WIDTH - MARGIN) * POINTS_PER_INCH / float(timeline.makespan or 1))
    axes.tick_params(labelbottom=True)
    axes.set_xlim(0, float(timeline.makespan))
    axes.set_xlabel("seconds")
    few = f"; with {drawn} micro-batches, and a step has {count}" if drawn < count else f" of {count} micro-batches"
    axes.set_title(f"pipeline: {timeline.name}{few}", loc="left", fontsize=10)
    axes.legend(handles=work_legend([timeline]), fontsize=8, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))


def draw_sweep(axes: Axes, report: PlanReport, axis: str) -> None:
    """Draw tokens per second over one axis: with the layout of the best plan, and with the best layout there."""
    points = [point for point in report.sensitivity if point.axis == axis]

    def speeds(of: Sequence[tuple[SweepPoint, float]]) -> tuple[list[float], list[float]]:
        return [point.value for point, _ in of], [speed for _, speed in of]

    kept = [(p, p.kept.tokens / p.kept.seconds / p.world_size) for p in points if p.kept is not None]
    best = [(p, p.plan.time.tokens / p.plan.time.seconds / p.world_size) for p in points if p.plan is not None]
    axes.plot(*speeds(kept), "-o", color=RUN_COLORS[0], label="this layout")
    if best:
        axes.plot(*speeds(best), "s", color=RUN_COLORS[1], fillstyle="none", label="the best layout there")
        axes.legend(fontsize=8, loc="lower right")
    axes.set_xscale("log", base=2)
    axes.set_xticks([point.value for point in points], [format_swept(point) for point in points], fontsize=8)
    axes.minorticks_off()
    axes.set_ylim(0, 1.15 * max((speed for _, speed in (*kept, *best)), default=1))
    axes.yaxis.set_major_formatter(lambda value, _: format_compact(value, trim=True))
    names = {"network": "bandwidth of the network", "batch": "samples of a step", "GPUs": "accelerators"}
    axes.set_title(f"tokens/s of a GPU by {names[axis]}", loc="left", fontsize=10)
