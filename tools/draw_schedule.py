"""Draw a pipeline schedule: ``python tools/draw_schedule.py --schedule zb-v --pipeline 8 --microbatches 24``.

Without ``--out`` it is drawn as text. ``--compare all`` prints the numbers of every schedule of that size and draws
them on a common time axis. ``--measured FILE`` draws the trace of a run with ``--profile-pipeline`` below a simulation
of it with the median duration of each action.
"""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.config.text import did_you_mean, echo
from megatron.data.errors import ToolParser
from megatron.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT, PipelineSchedule, ScheduleError
from megatron.pipeline.communication import add_communication
from megatron.pipeline.schedules import SCHEDULES, make_schedule
from megatron.pipeline.search import SEARCHED, search_schedule
from megatron.pipeline.simulate import StageCosts, Timeline, simulate
from megatron.pipeline.validate import validate_program
from megatron.planner.timeline import (
    chunk_indices,
    draw_figure,
    draw_text,
    figure_size,
    format_number,
    read_trace,
    text_legend,
    write_trace,
)
from megatron.training.loggers.plots import open_figure

ALL, FILE = "all", ".csv"
INTERLEAVED = "interleaved"
NAMES = (*SCHEDULES, SEARCHED)
ABOUT = {name: recipe.about for name, recipe in SCHEDULES.items()} | {
    SEARCHED: "The best schedule found for given times and memory."
}
STATUS = "Exit status: 1 when a schedule is refused or a file cannot be read or written, 2 for wrong flags."
MULTI_STAGE = (INTERLEAVED, SEARCHED)
"""Schedules with two stages per rank by default; the others have as few as possible."""
DEFAULT_TIMES = {"f": 1.0, "i": 1.0, "w": 1.0, "latency": 0.0, "transfer": 0.0}
"""Defaults of the flags for durations."""
SIZES = ("pipeline", "microbatches", "virtual", "group", "memory")
HEAD = ("schedule", "stages/rank", "makespan", "span", "bubble", "of span", "memory", "for I", "for W")


class Drawing(NamedTuple):
    """Timelines to draw."""

    panels: Mapping[str, Timeline]  # by title
    schedule: PipelineSchedule | None  # of the timelines, if they share one
    unit: str = ""  # of time, if known


def main(argv: Sequence[str]) -> int:
    """Draw, print the numbers and return the exit status."""
    parser = build_parser()
    arguments = parser.parse(argv)
    problem = find_mistake(arguments)
    if problem is not None:
        parser.error(problem)
    try:
        write_outputs(make_drawing(arguments), arguments)
    except ScheduleError as error:
        return parser.fail(describe_error(error), 1)
    except (ValueError, OSError) as error:
        return parser.fail(error, 1)
    return 0


def describe_error(error: ScheduleError) -> str:
    """Return why a schedule is invalid, and fixes."""
    return error.sentence + (f"\n  fix: {' | '.join(error.fixes)}" if error.fixes else "")


def build_parser() -> ToolParser:
    """Return the command-line parser, with the option names of a training run as aliases."""
    parser = ToolParser(
        "draw_schedule.py",
        description="Draw pipeline schedules: simulated, compared, or above what a run measured.",
        epilog=" ".join([*(f"{name}: {about}" for name, about in ABOUT.items()), STATUS]),
    )
    what = parser.add_argument_group("what to draw, one of the three")
    names = f"{', '.join(NAMES)}, or a file of actions that ends in {FILE}"
    what.add_argument("--schedule", "--pipeline-schedule", metavar="NAME", help=names)
    what.add_argument("--compare", nargs="+", metavar="NAME", help=f"several of these, or {ALL}")
    what.add_argument("--measured", type=Path, metavar="FILE", help="the trace of a run with --profile-pipeline")
    shape = parser.add_argument_group("size; files contain their own")
    alias = "--num-virtual-stages-per-pipeline-rank"
    stages = f"stages on each rank, where a schedule takes any number (default: {' and '.join(MULTI_STAGE)} 2, gpipe 1)"
    shape.add_argument("--pipeline", "--pipeline-model-parallel-size", type=parse_count, metavar="P", help="ranks")
    shape.add_argument("--microbatches", type=parse_count, metavar="M", help="micro-batches of a step")
    shape.add_argument("--virtual", alias, type=parse_count, metavar="V", help=stages)
    alias = "--microbatch-group-size-per-virtual-pipeline-stage"
    group = f"of {INTERLEAVED}: consecutive micro-batches of a stage (default: P)"
    shape.add_argument("--group", alias, type=parse_count, metavar="G", help=group)
    memory = f"of {SEARCHED}: limit of the micro-batches a rank holds, over all its stages (default: none)"
    shape.add_argument("--memory", type=parse_amount, metavar="LIMIT", help=memory)
    times = parser.add_argument_group("times in any unit; traces contain their own")
    long = "of a micro-batch on a rank, for all its stages"
    times.add_argument("--f", type=parse_amount, metavar="T", help=f"forward {long} (default: 1)")
    times.add_argument("--i", type=parse_amount, metavar="T", help=f"input gradients {long} (default: 1)")
    times.add_argument("--w", type=parse_amount, metavar="T", help=f"weight gradients {long} (default: 1)")
    times.add_argument(
        "--latency", type=parse_amount, metavar="T", help="of each transfer, independent of its size (default: 0)"
    )
    times.add_argument(
        "--transfer", type=parse_amount, metavar="T", help="of each transfer, due to its size (default: 0)"
    )
    written = parser.add_argument_group("output")
    written.add_argument("--out", type=Path, metavar="FILE", help="picture; .png, .pdf or .svg (default: text)")
    written.add_argument("--trace", type=Path, metavar="FILE", help="simulated times, for Chrome and Perfetto")
    written.add_argument("--csv", type=Path, metavar="FILE", help="the schedule, to be edited and passed to --schedule")
    return parser


def parse_count(text: str) -> int:
    """Parse an integer >= 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def parse_amount(text: str) -> float:
    """Parse a finite number >= 0."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number >= 0")
    return value


def find_mistake(arguments: argparse.Namespace) -> str | None:
    """Return why the flags are inconsistent, or None."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    sources = [f"--{name}" for name in ("schedule", "compare", "measured") if name in given]
    if len(sources) != 1:
        return f"{' and '.join(sources) or 'nothing'} to draw: use one of --schedule, --compare, --measured"
    by_name = [name for name in _names(given) if not name.endswith(FILE)]
    missing = [f"--{name}" for name in ("pipeline", "microbatches") if name not in given]
    unknown = [name for name in by_name if name not in NAMES]
    if unknown:
        guess = did_you_mean(unknown[0].lower(), NAMES)
        which = f"did you mean {guess}?" if guess else f"one is {', '.join(NAMES)}, or a file whose name ends in {FILE}"
        return f"there is no schedule {unknown[0]}: {which}"
    if by_name and missing:
        return f"the size of {by_name[0]} is not specified: add {' and '.join(missing)}"
    for name, reason in _unused(given):
        if name in given:
            return f"--{name} has no effect here: {reason}"
    zero = [f"--{name} 0" for name in "fiw" if given.get(name) == 0]
    return f"{zero[0]}: must be above 0" if zero else None


def _names(given: Mapping[str, Any]) -> Sequence[str]:
    """Return the requested schedules."""
    names = given.get("compare", [given["schedule"]] if "schedule" in given else [])
    return NAMES if list(names) == [ALL] else names


def _unused(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield flags without effect beside the given ones, and the reason."""
    names = _names(given)
    if all(name.endswith(FILE) for name in names):
        yield from ((name, "the file defines its size") for name in SIZES)
    if "measured" in given:
        yield from ((name, "the simulation uses the measured times") for name in DEFAULT_TIMES)
    if "compare" in given:
        yield from ((name, "it applies to one schedule, given by --schedule") for name in ("trace", "csv"))
        if not {*MULTI_STAGE} & {*names}:
            yield "virtual", f"none of {' and '.join(MULTI_STAGE)} is compared"
    if INTERLEAVED not in names:
        yield "group", f"it applies to {INTERLEAVED}"
    if SEARCHED not in names:
        yield "memory", f"it applies to {SEARCHED}"


def make_drawing(arguments: argparse.Namespace) -> Drawing:
    """Return the timelines to draw. In a comparison, invalid schedules are reported and left out."""
    if arguments.measured:
        return compare_with_measured(read_trace(arguments.measured))
    if not arguments.compare:
        return draw_one(arguments.schedule, arguments)
    panels: dict[str, Timeline] = {}
    for name in _names(vars(arguments)):
        try:
            panels.update(draw_one(name, arguments).panels)
        except ScheduleError as error:
            echo(f"draw_schedule: {name} is left out: {describe_error(error)}", file=sys.stderr)
    if not panels:
        raise ScheduleError("none of these schedules can be drawn")
    return Drawing(panels, None)


def draw_one(name: str, arguments: argparse.Namespace) -> Drawing:
    """Return the timeline of one schedule. The title of a searched one includes the name of the schedule found."""
    schedule = make_named_schedule(name, arguments)
    title = f"{name} ({schedule.name})" if name == SEARCHED != schedule.name else schedule.name
    costs = costs_from_flags(arguments, len(schedule.ranks), schedule.stages)
    return Drawing({title: validate_and_simulate(schedule, costs)}, schedule)


def make_named_schedule(name: str, arguments: argparse.Namespace) -> PipelineSchedule:
    """Return a schedule from its file, or of the size given by the flags."""
    if name.endswith(FILE):
        return PipelineSchedule.load(Path(name))
    ranks, microbatches = arguments.pipeline, arguments.microbatches
    chunks = 2 if name in MULTI_STAGE else SCHEDULES[name].chunks or 1
    if arguments.virtual and (name in MULTI_STAGE or not arguments.compare):
        chunks = arguments.virtual
    if name == SEARCHED:
        costs = costs_from_flags(arguments, ranks, ranks * chunks)
        return search_schedule(ranks, chunks, microbatches, costs, arguments.memory)
    return make_schedule(name, ranks, chunks, microbatches, arguments.group if name == INTERLEAVED else None)


def validate_and_simulate(schedule: PipelineSchedule, costs: StageCosts) -> Timeline:
    """Validate and simulate a schedule."""
    program = add_communication(schedule)
    validate_program(program)
    return simulate(program, costs)


def costs_from_flags(arguments: argparse.Namespace, ranks: int, stages: int) -> StageCosts:
    """Return the costs given by the flags, divided equally among the stages of a rank."""
    share = ranks / stages
    given = {name: getattr(arguments, name) for name in DEFAULT_TIMES}
    times = {name: DEFAULT_TIMES[name] if value is None else value for name, value in given.items()}
    forward, input, weight = ((share * times[name],) * stages for name in "fiw")
    return StageCosts(forward, input, weight, times["latency"], times["transfer"], (share,) * stages, (share,) * stages)


def compare_with_measured(measured: Timeline) -> Drawing:
    """Return a measured timeline and a simulation of the same actions with their median durations."""
    schedule = PipelineSchedule(measured.name, tuple(tuple(i.action for i in rank) for rank in measured.intervals))
    share = (len(schedule.ranks) / schedule.stages,) * schedule.stages
    if not measured.activation:
        measured = replace(measured, activation=share, weight_memory=share)
    timeline = validate_and_simulate(schedule, median_costs(measured, schedule.stages))
    panels = {f"{measured.name}, simulated": timeline, f"{measured.name}, measured": measured}
    return Drawing(panels, schedule, "seconds")


def median_costs(measured: Timeline, stages: int) -> StageCosts:
    """Return the median duration of each stage's actions, and of transfers if measured, in seconds.

    If a stage has no separate input gradients, the duration of its backward passes is used.
    """
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for rank in measured.intervals:
        for (stage, kind, _), start, end in rank:
            seconds[stage, kind].append(end - start)
    typical = {key: median(values) for key, values in seconds.items()}
    forward = tuple(typical.get((stage, FORWARD), 0.0) for stage in range(stages))
    weight = tuple(typical.get((stage, WEIGHT), 0.0) for stage in range(stages))
    whole = (typical.get((stage, BACKWARD), 0.0) for stage in range(stages))
    input = tuple(typical.get((stage, INPUT), both) for stage, both in enumerate(whole))
    transfer = median([moved.end - moved.start for moved in measured.transfers] or [0.0])
    return StageCosts(forward, input, weight, 0.0, transfer, measured.activation, measured.weight_memory)


def write_outputs(drawing: Drawing, arguments: argparse.Namespace) -> None:
    """Print the numbers and write the output files; without ``--out``, draw on the terminal."""
    echo(table(drawing.panels))
    timelines = list(drawing.panels.values())
    if arguments.csv and drawing.schedule:
        drawing.schedule.save(arguments.csv)
    if arguments.trace:
        write_trace(timelines[0], arguments.trace)
    if arguments.out:
        with open_figure(arguments.out, *figure_size(drawing.panels), grid=False) as figure:
            draw_figure(figure, drawing.panels, drawing.unit, arguments.memory)
    elif not arguments.compare:
        width, color = shutil.get_terminal_size((120, 24)).columns, sys.stdout.isatty()
        clock = max(timeline.makespan for timeline in timelines)
        drawings = [f"{name}\n{draw_text(timeline, width, color, clock)}" for name, timeline in drawing.panels.items()]
        sys.stdout.write("\n".join(["", *drawings, text_legend(timelines), ""]))  # in colours
    for path in filter(None, (arguments.csv, arguments.trace, arguments.out)):
        echo(path)


def table(panels: Mapping[str, Timeline]) -> str:
    """Return a row of numbers for each timeline. Peaks are those of the rank with the highest."""
    rows: list[tuple[str, ...]] = [HEAD]
    for name, timeline in panels.items():
        peaks = (timeline.peak_memory, timeline.peak_activations, timeline.peak_weights)
        cells = (
            name,
            str(max(chunk_indices(timeline).values(), default=0) + 1),
            format_number(timeline.makespan),
            format_number(timeline.span),
            f"{timeline.bubble:.1%}",
            f"{timeline.span_bubble:.1%}",
            *(format_number(max(peak, default=0)) for peak in peaks),
        )
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    )
    return "\n".join(lines)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exit quietly when the reader of a pipe closes it
    sys.exit(main(sys.argv[1:]))
