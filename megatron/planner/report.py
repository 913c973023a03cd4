"""Plans as text: the table of the best, and one in full."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron.config.run import RunConfig
from megatron.config.text import format_compact
from megatron.pipeline.plan import virtual_stages
from megatron.planner.costs import RunCosts
from megatron.planner.search import Plan
from megatron.planner.step_time import PARTS

Cell = Callable[[RunConfig, int], object]

LAYOUT: Mapping[str, tuple[str, Cell]] = {
    "TP": ("1", lambda run, ranks: run.parallel.tensor_model_parallel_size),
    "CP": ("1", lambda run, ranks: _context(run)),
    "PP": ("1", lambda run, ranks: run.parallel.pipeline_model_parallel_size),
    "schedule": ("", lambda run, ranks: _schedule(run)),
    "EP": ("1", lambda run, ranks: run.parallel.expert_model_parallel_size),
    "ETP": ("1", lambda run, ranks: run.parallel.expert_tp if run.model.num_experts else 1),
    "DP": ("", lambda run, ranks: run.parallel.data_parallel_size(ranks)),
    "ZeRO": ("", lambda run, ranks: _zero(run)),
    "micro": ("", lambda run, ranks: run.training.micro_batch_size),
    "recompute": ("none", lambda run, ranks: _recompute(run)),
    "offload": ("none", lambda run, ranks: _offload(run)),
}
"""Columns of a layout: the cell that says nothing, which is the default of a run, and that of a run."""


def _context(run: RunConfig) -> str:
    size = run.parallel.context_parallel_size
    return f"{size} {run.parallel.cp_comm_type}" if size > 1 else "1"


def _schedule(run: RunConfig) -> str:
    chunks = virtual_stages(run.model, run.parallel)
    if run.parallel.pipeline_model_parallel_size == 1:
        return ""
    return f"{run.parallel.pipeline_schedule} x{chunks}" if chunks > 1 else str(run.parallel.pipeline_schedule)


def _zero(run: RunConfig) -> str:
    instances = run.parallel.num_distributed_optimizer_instances
    return f"{run.parallel.zero_stage}" + (f" in {instances}" if instances > 1 else "")


def _recompute(run: RunConfig) -> str:
    training = run.training
    if training.recompute_granularity == "full" and training.recompute_method == "block":
        return f"{training.recompute_num_layers} blocks"
    return training.recompute_granularity or "none"


def _offload(run: RunConfig) -> str:
    found = ("optimizer",) * run.optimizer.optimizer_cpu_offload
    if run.training.cpu_offloading_num_layers:
        found += (f"{run.training.cpu_offloading_num_layers} layers",)
    return ", ".join(found) or "none"


def plans_table(plans: Sequence[Plan], costs: Sequence[RunCosts], world_size: int) -> Iterator[str]:
    """Yield the lines of the table of plans; columns of layouts that are the same default in all are left out."""
    columns: dict[str, list[str]] = {"": [str(place) for place in range(1, len(plans) + 1)]}
    for name, (usual, cell) in LAYOUT.items():
        cells = [str(cell(plan.config, world_size)) for plan in plans]
        if {*cells} != {usual}:
            columns[name] = cells
    columns |= {
        "GiB": [f"{sum(plan.memory.values()) / 2**30:.1f}" for plan in plans],
        "bubble": [f"{plan.time.bubble:.1%}" for plan in plans],
        "s/step": [f"{plan.time.seconds:.3f}" for plan in plans],
        "MFU": [f"{cost.mfu:.1%}" for cost in costs],
        "tokens/s": [format_compact(cost.tokens_per_second) for cost in costs],
        "days": [f"{cost.days:.1f}" for cost in costs],
    }
    yield from _aligned([[*columns], *map(list, zip(*columns.values()))])


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip()


def step_parts(plan: Plan) -> Iterator[str]:
    """Yield a line for each part of a step that takes time."""
    time = plan.time
    for part in PARTS:
        if seconds := time.parts[part]:
            yield f"{part:<12}{seconds:>10.3f} s {seconds / time.seconds:>6.1%}"
