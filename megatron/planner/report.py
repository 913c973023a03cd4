"""Plans as text and as plain values: the table of the best ones, and one of them in full.

Everything is read from :class:`PlanReport`, so that text, pictures and JSON show the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.config.text import counted, format_bytes, format_compact, format_three_digits
from megatron.layers.parameters import num_parameters
from megatron.pipeline.plan import schedule_name, virtual_stages
from megatron.planner.communication import AXES
from megatron.planner.costs import RunCosts, Terms
from megatron.planner.memory import peaks_by_rank
from megatron.planner.search import LayoutSearch, Neighbour, Plan
from megatron.planner.sensitivity import NETWORK, SweepPoint, sweep
from megatron.planner.step_time import PARTS, StepTime

MEMORY_PARTS: Mapping[str, tuple[str, ...]] = {
    "weights": ("weights", "FP8 weights", "converted weights"),
    "gradients": ("gradients",),
    "optimizer": ("main params", "moments"),
    "activations": ("activations", "delayed gradients"),
    "logits": ("logits",),
    "temporary": ("temporary",),
    "communication": ("gathered weights", "reduction", "pipeline buffers", "NCCL estimate"),
}
"""Parts of a rank's memory as they are shown, and of what each is the sum; all else is ``other``."""

ACCURACY = {
    False: "333 published dense runs took times that differ by 6.6% in the median, 90% of them by at most 19.5%",
    True: "104 published runs with experts took times that differ by 16.1% in the median, 90% of them by at most 46.9%",
}
"""Differences between measured runs and such forecasts (benchmarks/results/published.md), by whether there are
experts."""


@dataclass(frozen=True)
class PlanReport:
    """The plans of a run, with what is shown of them."""

    search: LayoutSearch
    terms: Terms
    # The best first.
    plans: Sequence[Plan]
    costs: Sequence[RunCosts]
    # By plan, of every pipeline rank: bytes by part of its fullest rank.
    memories: Sequence[Sequence[Mapping[str, int]]]
    # Of the best plan.
    neighbours: Sequence[Neighbour]
    sensitivity: Sequence[SweepPoint]
    # Flags of the run, without those of a plan; and those of them that were assumed.
    flags: str
    assumed: str = ""

    @classmethod
    def of(
        cls,
        search: LayoutSearch,
        terms: Terms,
        plans: Sequence[Plan],
        flags: str,
        assumed: str = "",
        again: bool = False,
    ) -> PlanReport:
        """Complete a report.

        Args:
            search: that found the plans.
            terms: of the run.
            plans: at least one, the best first.
            flags: of the run, without those of a plan.
            assumed: those of the flags that nobody gave.
            again: whether to search again for the sensitivity (:func:`megatron.planner.sensitivity.sweep`).
        """
        costs = [RunCosts.of(plan, search.world_size, search.cluster, terms) for plan in plans]
        peaks = (peaks_by_rank(plan.config, search.world_size) for plan in plans)
        memories = [[shown_memory(parts) for parts in ranks] for ranks in peaks]
        neighbours, swept = search.neighbours(plans[0]), [*sweep(search, plans[0], again)]
        return cls(search, terms, plans, costs, memories, neighbours, swept, flags, assumed)

    @property
    def memory(self) -> Sequence[Mapping[str, int]]:
        """Bytes by pipeline rank and part of the best plan."""
        return self.memories[0]

    def command(self, plan: Plan) -> str:
        """Return the command line that checks a plan; a run drops its last two flags."""
        chosen = [
            SETTINGS[name].spell(value)
            for name, value in plan.chosen.items()
            if name not in self.search.given and value != SETTINGS[name].default
        ]
        words = ["python pretrain_gpt.py", self.flags, *chosen, f"--world-size {self.search.world_size}"]
        return " ".join([*words, "--check-config"])


def shown_memory(parts: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes by :data:`MEMORY_PARTS`; these add up to those of all parts."""
    shown = {name: sum(parts.get(part, 0) for part in of) for name, of in MEMORY_PARTS.items()}
    return shown | {"other": sum(parts.values()) - sum(shown.values())}


def _context(run: RunConfig) -> str:
    size = run.parallel.context_parallel_size
    return f"{size} {run.parallel.cp_comm_type}" if size > 1 else "1"


def _schedule(run: RunConfig) -> str:
    if run.parallel.pipeline_model_parallel_size == 1:
        return ""
    chunks = virtual_stages(run.model, run.parallel)
    name = schedule_name(run.parallel, chunks)
    return f"{name} x{chunks}" if chunks > 1 else name


def _zero(run: RunConfig) -> str:
    instances = run.parallel.num_distributed_optimizer_instances
    return f"{run.parallel.zero_stage}" + (f" in {instances}" if instances > 1 else "")


def _recompute(run: RunConfig) -> str:
    training = run.training
    if training.recompute_granularity == "full" and training.recompute_method == "block":
        return counted(training.recompute_num_layers or 0, "block")
    return training.recompute_granularity or "none"


def _offload(run: RunConfig) -> str:
    found = ("optimizer",) * run.optimizer.optimizer_cpu_offload + ("weights",) * run.parallel.param_cpu_offload
    if run.training.cpu_offloading_num_layers:
        found += (f"{run.training.cpu_offloading_num_layers} layers",)
    return ", ".join(found) or "none"


LAYOUT: Mapping[str, tuple[str, Callable[[RunConfig], object]]] = {
    "TP": ("1", lambda run: run.parallel.tensor_model_parallel_size),
    "SP": ("no", lambda run: "yes" if run.parallel.sequence_parallel else "no"),
    "CP": ("1", _context),
    "PP": ("1", lambda run: run.parallel.pipeline_model_parallel_size),
    "schedule": ("", _schedule),
    "EP": ("1", lambda run: run.parallel.expert_model_parallel_size),
    "ETP": ("1", lambda run: run.parallel.expert_tp if run.model.num_experts else 1),
    "ZeRO": ("", _zero),
    "micro": ("", lambda run: run.training.micro_batch_size),
    "recompute": ("none", _recompute),
    "offload": ("none", _offload),
    "FP8": ("no", lambda run: run.precision.fp8_format or "no"),
}
"""Columns of a layout: the cell that a run has by default, and that of a run."""


def layout_cells(plan: Plan, world_size: int) -> dict[str, str]:
    """Return the cells of a layout by :data:`LAYOUT`, and of data parallelism."""
    cells = {name: str(cell(plan.config)) for name, (_, cell) in LAYOUT.items()}
    return cells | {"DP": str(plan.config.parallel.data_parallel_size(world_size))}


def describe_layout(plan: Plan, world_size: int) -> str:
    """Return a layout in a line: ``TP 8 with SP, PP 4 (1f1b), ZeRO 1, micro-batch 1, DP 32``."""
    cells = layout_cells(plan, world_size)
    words = {"micro": "micro-batch", "recompute": "recomputed:", "offload": "offloaded:"}
    details = {"TP": " with SP" * (cells["SP"] == "yes"), "PP": f" ({cells['schedule']})"}
    shown = (name for name in cells if name not in ("SP", "schedule") and cells[name] != LAYOUT.get(name, ("",))[0])
    return ", ".join(f"{words.get(name, name)} {cells[name]}{details.get(name, '')}" for name in shown)


def table(report: PlanReport) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of plans; columns that are the same default in all are left out."""
    plans, costs, ranks = report.plans, report.costs, report.search.world_size
    layouts = [layout_cells(plan, ranks) for plan in plans]
    columns: dict[str, list[str]] = {"": [str(place) for place in range(1, len(plans) + 1)]}
    for name in layouts[0]:
        cells = [layout[name] for layout in layouts]
        if {*cells} != {LAYOUT.get(name, ("",))[0]}:
            columns[name] = cells
    columns |= {
        "GiB": [f"{plan.bytes / 2**30:.1f}" for plan in plans],
        "bubble": [f"{plan.time.bubble:.1%}" for plan in plans],
        "waits": [f"{sum(plan.time.parts[axis] for axis in AXES) / plan.time.seconds:.1%}" for plan in plans],
        "s/step": [short(plan.time.seconds) for plan in plans],
        "MFU": [f"{cost.mfu:.1%}" for cost in costs],
        "tokens/s": [format_compact(cost.tokens_per_second) for cost in costs],
        "days": [format_three_digits(cost.days) for cost in costs],
    }
    if report.terms.price is not None:
        columns["cost"] = [format_compact(cost.price or 0) for cost in costs]
    return [*columns], [*map(list, zip(*columns.values()))]


def aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield rows of cells as lines of equal columns, aligned to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip()


def title(report: PlanReport) -> str:
    """Return what is planned, in a line."""
    cluster, model = report.search.cluster, report.search.config.model
    gpus = f"{report.search.world_size:,} x {cluster.accelerator.name} in nodes of {cluster.node_size}"
    active = f", {format_compact(num_parameters(model, active=True))} active" if model.num_experts else ""
    size = f"{format_compact(num_parameters(model))} parameters{active}"
    batch = report.plans[0].time.tokens
    length = report.search.config.training.seq_length
    return f"{size}, {batch // length:,} samples of {length:,} tokens a step, {gpus}"


def memory_rows(report: PlanReport) -> Iterator[list[str]]:
    """Yield head and rows of the memory by pipeline rank in GiB; neighbouring ranks with equal rows share one."""
    names = [name for name in report.memory[0] if any(rank[name] >= 2**20 for rank in report.memory)]
    yield ["rank", *names, "sum", "of what fits"]
    first = 0
    for parts, same in groupby(report.memory):
        last = first + len(list(same)) - 1
        total = sum(parts.values())
        cells = [f"{parts[name] / 2**30:.2f}" for name in names]
        yield [
            f"{first}" if first == last else f"{first}-{last}",
            *cells,
            f"{total / 2**30:.2f}",
            f"{total / report.search.capacity:.0%}",
        ]
        first = last + 1


def step_rows(plan: Plan) -> Iterator[list[str]]:
    """Yield rows of the parts that take at least 0.05 % of a step: name, seconds, share."""
    for part in PARTS:
        seconds = plan.time.parts[part]
        if seconds >= 0.0005 * plan.time.seconds:
            yield [part, f"{short(seconds)} s", f"{seconds / plan.time.seconds:.1%}"]
    yield ["sum", f"{short(plan.time.seconds)} s", ""]


def communication_rows(plan: Plan) -> Iterator[list[str]]:
    """Yield head and rows of the communication by axis; only the head if there is none."""
    time = plan.time
    yield ["axis", "sent by a rank", "takes", "not hidden"]
    for axis in AXES:
        if time.sent[axis]:
            yield [
                axis,
                format_bytes(time.sent[axis]),
                f"{short(time.communicating[axis])} s",
                f"{short(time.parts[axis])} s",
            ]


def cost_rows(report: PlanReport) -> Iterator[tuple[str, str]]:
    """Yield names and values of what a run with the best plan takes."""
    cost, terms = report.costs[0], report.terms
    peak = report.search.cluster.accelerator.peak("bf16")
    rate = format_compact(cost.tokens_per_second)
    yield "throughput", f"{rate} tokens/s, {cost.throughput / 1e12:.0f} TFLOP/s per GPU as Megatron-LM counts"
    yield "MFU", f"{cost.mfu:.1%} of {peak / 1e12:,.0f} TFLOP/s in bf16: 6N + 12Lhs FLOPs per token (PaLM)"
    yield "MFU, causal", f"{cost.mfu_causal:.1%}: masked scores do not count"
    recomputed = report.plans[0].time.parts["recompute"]
    yield "HFU", f"{cost.hfu:.1%}, {'with recomputation' if recomputed else 'as nothing is recomputed'}"
    yield "run", f"{format_compact(terms.tokens)} tokens in {cost.steps:,} steps: {format_days(cost.days)}"
    yield "GPU-hours", f"{cost.gpu_hours:,.0f}"
    if cost.price is not None:
        yield "cost", f"{cost.price:,.0f} at {terms.price:g} per GPU-hour"
    energy = f"{cost.energy / 1000:,.1f} MWh" if cost.energy >= 1000 else f"{cost.energy:,.0f} kWh"
    yield "energy", f"{energy} at {terms.watts:,.0f} W per GPU"
    stall = f"; training waits {format_seconds(cost.save)}" if cost.save < cost.write else ""
    yield "checkpoint", f"{format_bytes(cost.checkpoint)}, written in {format_seconds(cost.write)}{stall}"
    steps = max(1, round(cost.interval / report.plans[0].time.seconds))
    failures = f"for a failure every {format_seconds(cost.mtbf)} (Daly 2006)"
    yield "saves", f"every {format_seconds(cost.interval)} (--save-interval {steps}) {failures}"
    yield "in all", f"{format_days(cost.days_with_failures)} with saves and the work that failures undo"
    experts = report.search.config.model.num_experts is not None
    yield "accuracy", f"{ACCURACY[experts]} (benchmarks/results/published.md)"


def sweep_rows(report: PlanReport) -> Iterator[list[str]]:
    """Yield head and rows of the sensitivity: with the layout of the best plan, and with the best of each point."""
    again, refused = (any(getattr(each, name) for each in report.sensitivity) for name in ("plan", "refused"))
    more = ["best there", "s/step", "MFU", "days"] if again else []
    yield ["", "", "s/step", "MFU", "days", *more, *["why refused"] * refused]
    for point in report.sensitivity:
        row = [point.axis, format_swept(point), *_time_cells(report, point, point.kept)]
        if again:
            time = None if point.plan is None else point.plan.time
            layout = "none fits" if point.plan is None else describe_layout(point.plan, point.world_size)
            row += [layout, *_time_cells(report, point, time)]
        yield row + [point.refused] * refused


def format_swept(point: SweepPoint) -> str:
    """Format the value of a point of a sweep."""
    return f"{point.value * 8 / 1e9:,.0f} Gb/s" if point.axis == NETWORK else f"{point.value:,.0f}"


def _time_cells(report: PlanReport, point: SweepPoint, time: StepTime | None) -> list[str]:
    if time is None:
        return ["refused", "", ""]
    rate = time.tokens / time.seconds
    mfu = report.costs[0].flops * rate / point.world_size / report.search.cluster.accelerator.peak("bf16")
    return [short(time.seconds), f"{mfu:.1%}", format_three_digits(report.terms.tokens / rate / 86400)]


def short(number: float) -> str:
    """Format with up to three decimals, and with three digits below 0.1."""
    if number < 0.1:
        return f"{number:.3g}"
    decimals = 3 if number < 10 else 2 if number < 100 else 1 if number < 1000 else 0
    return f"{number:,.{decimals}f}"


def format_days(days: float) -> str:
    """Format days: ``12.3 days``, ``5.2 hours``."""
    return f"{days:,.1f} days" if days >= 2 else f"{24 * days:,.1f} hours"


def format_seconds(seconds: float) -> str:
    """Format a duration in its largest unit: ``3.2 hours``, ``14 minutes``, ``8.1 s``."""
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:,.1f} hours"
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.1f} s"


def why_not(neighbour: Neighbour) -> str:
    """Return why a neighbour of the best plan is not chosen."""
    plan = neighbour.plan
    return neighbour.refused or neighbour.reason or ("" if plan is None else f"{neighbour.slower:+.3g} s")


def text(report: PlanReport, explain: bool = False) -> Iterator[str]:
    """Yield the lines of the report."""
    best = report.plans[0]
    yield title(report)
    if report.assumed:
        yield f"assumed: {report.assumed}"
    yield ""
    head, rows = table(report)
    yield from aligned([head, *rows])
    yield ""
    yield f"plan 1: {describe_layout(best, report.search.world_size)}"
    if (gap := report.search.may_be_beaten_by(best)) > 0:
        yield (
            f"the search was cut short, and another layout may be up to {gap:.0%} faster; options that are given, such "
            "as --micro-batch-size 1, shorten it"
        )
    yield ""
    yield f"GiB of a rank by pipeline rank; {report.search.capacity / 2**30:.1f} fit"
    yield from _indented(aligned(memory_rows(report)))
    yield ""
    yield "seconds of a step"
    yield from _indented(aligned(step_rows(best)))
    communication = [*communication_rows(best)]
    if len(communication) > 1:
        yield ""
        yield "communication in a step"
        yield from _indented(aligned(communication))
    yield ""
    yield from (f"{name:<13}{value}" for name, value in cost_rows(report))
    if report.neighbours:
        yield ""
        yield "other choices"
        width = max(len(each.change) for each in report.neighbours)
        yield from (f"  {each.change:<{width}}  {why_not(each)}" for each in report.neighbours)
    yield ""
    yield "other networks, batches and numbers of accelerators"
    yield from _indented(aligned(sweep_rows(report)))
    if explain:
        yield ""
        yield from explanation(report)
    yield ""
    yield "check plan 1; to run it, replace the last two flags by the launcher of the cluster"
    yield f"  {report.command(best)}"


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def explanation(report: PlanReport) -> Iterator[str]:
    """Yield the formulas of the best plan with their numbers."""
    best, search = report.plans[0], report.search
    yield "formulas"
    yield from _indented(best.time.explanation)
    yield from _indented(report.costs[0].explain(best.time, search.world_size, search.cluster, report.terms))


def as_dict(report: PlanReport) -> dict[str, Any]:
    """Return all numbers of a report as plain values, for JSON."""
    search = report.search
    return {
        "title": title(report),
        "assumed": report.assumed,
        "world_size": search.world_size,
        "accelerator": asdict(search.cluster.accelerator),
        "node_size": search.cluster.node_size,
        "network": search.cluster.network._asdict(),
        "efficiency": asdict(search.cluster.efficiency),
        "terms": asdict(report.terms),
        "capacity": report.search.capacity,
        "may_be_beaten_by": search.may_be_beaten_by(report.plans[0]),
        "plans": [
            plan_dict(plan, search.world_size)
            | {"memory_by_pipeline_rank": [dict(parts) for parts in ranks]}
            | {"costs": asdict(cost), "command": report.command(plan)}
            for plan, ranks, cost in zip(report.plans, report.memories, report.costs)
        ],
        "neighbours": [
            {"change": each.change, "flags": list(each.flags), "reason": why_not(each)}
            | ({} if each.plan is None else {"plan": plan_dict(each.plan, search.world_size)})
            for each in report.neighbours
        ],
        "sensitivity": [
            {"axis": point.axis, "value": point.value, "world_size": point.world_size, "refused": point.refused}
            | {"kept_seconds": None if point.kept is None else point.kept.seconds}
            | {"best": None if point.plan is None else plan_dict(point.plan, point.world_size)}
            for point in report.sensitivity
        ],
        "explanation": [*explanation(report)],
    }


def plan_dict(plan: Plan, world_size: int) -> dict[str, Any]:
    """Return a plan as plain values: seconds and bytes."""
    time = plan.time
    return {
        "layout": layout_cells(plan, world_size),
        "flags": plan.flags,
        "seconds": time.seconds,
        "tokens": time.tokens,
        "parts": dict(time.parts),
        "sent": dict(time.sent),
        "communicating": dict(time.communicating),
        "memory": dict(plan.memory),
    }
