"""Draw what a pipeline schedule does: ``python tools/draw_schedule.py --schedule zb-v --pipeline 8 --microbatches 24``.

Without ``--out`` it is drawn as text. ``--compare all`` tells the numbers of every schedule of that size, and draws
them on one clock; ``--measured FILE`` draws what a run with ``--profile-pipeline`` did, and above what it would take if
every action took as long as most of its kind.
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

from megatron.config.problems import did_you_mean
from megatron.data.command_line import Parser
from megatron.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule, ScheduleError
from megatron.pipeline.comms import add_communication
from megatron.pipeline.picture import draw, size
from megatron.pipeline.schedules import SCHEDULES, make
from megatron.pipeline.search import NAME as SEARCHED
from megatron.pipeline.search import search
from megatron.pipeline.simulate import Costs, Timeline, simulate
from megatron.pipeline.terminal import chunks_of, drawn, legend, number
from megatron.pipeline.trace import read_trace, write_trace
from megatron.pipeline.validate import validate
from megatron.training.plot import picture

ALL, FILE = "all", ".csv"
INTERLEAVED = "interleaved"
NAMES = (*SCHEDULES, SEARCHED)
ABOUT = {name: recipe.about for name, recipe in SCHEDULES.items()} | {
    SEARCHED: "The best found for given times and memory."
}
STATUS = "Exit status: 1 when a schedule is refused or a file cannot be read or written, 2 for wrong flags."
SEVERAL = (INTERLEAVED, SEARCHED)
"""Schedules that have two stages on a rank unless told otherwise; the others have as few as they can."""
TIMES = {"f": 1.0, "i": 1.0, "w": 1.0, "latency": 0.0, "transfer": 0.0}
"""Flags that say how long something takes, and what they say by default."""
SIZES = ("pipeline", "microbatches", "virtual", "group", "memory")
HEAD = ("schedule", "stages/rank", "makespan", "span", "bubble", "of span", "memory", "for I", "for W")


class Drawing(NamedTuple):
    """Timelines by title; the one schedule that they are of, if it is one; the unit of time, if it is known."""

    panels: Mapping[str, Timeline]
    schedule: Schedule | None
    unit: str = ""


def main(argv: Sequence[str]) -> int:
    """Draw, and print the numbers; returns the exit status."""
    parser = build_parser()
    arguments = parser.parse(argv)
    wrong = mistake(arguments)
    if wrong is not None:
        parser.error(wrong)
    try:
        finish(asked_for(arguments), arguments)
    except ScheduleError as error:
        tell(error)
        return 1
    except (ValueError, OSError) as error:
        print(f"draw_schedule: {error}", file=sys.stderr)
        return 1
    return 0


def tell(error: ScheduleError, about: str = "") -> None:
    """Print why a schedule is refused, and what to do."""
    fixes = f"\n  fix: {' | '.join(error.fixes)}" if error.fixes else ""
    print(f"draw_schedule: {about}{error.sentence}{fixes}", file=sys.stderr)


def build_parser() -> Parser:
    """The command line. The names that a training run has for the same options work too."""
    parser = Parser(
        "draw_schedule.py",
        description="Draw pipeline schedules: simulated, compared, or above what a run measured.",
        epilog=" ".join([*(f"{name}: {about}" for name, about in ABOUT.items()), STATUS]),
    )
    what = parser.add_argument_group("what is drawn, one of the three")
    names = f"{', '.join(NAMES)}, or a file of actions that ends in {FILE}"
    what.add_argument("--schedule", "--pipeline-schedule", metavar="NAME", help=names)
    what.add_argument("--compare", nargs="+", metavar="NAME", help=f"several of these, or {ALL}")
    what.add_argument("--measured", type=Path, metavar="FILE", help="the trace of a run with --profile-pipeline")
    shape = parser.add_argument_group("size; a file brings its own")
    alias = "--num-virtual-stages-per-pipeline-rank"
    stages = f"stages on each rank, where a schedule takes any number (default: {' and '.join(SEVERAL)} 2, gpipe 1)"
    shape.add_argument("--pipeline", "--pipeline-model-parallel-size", type=count, metavar="P", help="ranks")
    shape.add_argument("--microbatches", type=count, metavar="M", help="micro-batches of a step")
    shape.add_argument("--virtual", alias, type=count, metavar="V", help=stages)
    alias = "--microbatch-group-size-per-virtual-pipeline-stage"
    group = f"of {INTERLEAVED}: micro-batches that a stage takes in a row (default: P)"
    shape.add_argument("--group", alias, type=count, metavar="G", help=group)
    memory = f"of {SEARCHED}: micro-batches of all its stages that a rank holds at most (default: any number)"
    shape.add_argument("--memory", type=amount, metavar="LIMIT", help=memory)
    times = parser.add_argument_group("times in any unit; a trace brings its own")
    long = "of a rank, all its stages together, for a micro-batch"
    times.add_argument("--f", type=amount, metavar="T", help=f"forward {long} (default: 1)")
    times.add_argument("--i", type=amount, metavar="T", help=f"gradients of inputs {long} (default: 1)")
    times.add_argument("--w", type=amount, metavar="T", help=f"gradients of weights {long} (default: 1)")
    times.add_argument("--latency", type=amount, metavar="T", help="of each transfer, whatever its size (default: 0)")
    times.add_argument("--transfer", type=amount, metavar="T", help="of each transfer, for its size (default: 0)")
    written = parser.add_argument_group("what is written")
    written.add_argument("--out", type=Path, metavar="FILE", help="picture; .png, .pdf or .svg (default: text)")
    written.add_argument("--trace", type=Path, metavar="FILE", help="simulated times, for Chrome and Perfetto")
    written.add_argument("--csv", type=Path, metavar="FILE", help="the schedule, to be edited and brought along")
    return parser


def count(text: str) -> int:
    """A whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def amount(text: str) -> float:
    """A finite number from 0 on."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return value


def mistake(arguments: argparse.Namespace) -> str | None:
    """Why the flags do not go together, if they do not."""
    said = {name: value for name, value in vars(arguments).items() if value is not None}
    sources = [f"--{name}" for name in ("schedule", "compare", "measured") if name in said]
    if len(sources) != 1:
        return f"{' and '.join(sources) or 'nothing'} to draw: say one of --schedule, --compare, --measured"
    by_name = [name for name in _names(said) if not name.endswith(FILE)]
    missing = [f"--{name}" for name in ("pipeline", "microbatches") if name not in said]
    unknown = [name for name in by_name if name not in NAMES]
    if unknown:
        guess = did_you_mean(unknown[0].lower(), NAMES)
        which = f"did you mean {guess}?" if guess else f"one is {', '.join(NAMES)}, or a file whose name ends in {FILE}"
        return f"there is no schedule {unknown[0]}: {which}"
    if by_name and missing:
        return f"{by_name[0]} has no size of its own: add {' and '.join(missing)}"
    for name, reason in _idle(said):
        if name in said:
            return f"--{name} says nothing here: {reason}"
    zero = [f"--{name} 0" for name in "fiw" if said.get(name) == 0]
    return f"{zero[0]}: every action takes some time" if zero else None


def _names(said: Mapping[str, Any]) -> Sequence[str]:
    """The schedules that flags ask for."""
    names = said.get("compare", [said["schedule"]] if "schedule" in said else [])
    return NAMES if list(names) == [ALL] else names


def _idle(said: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Flags that mean nothing beside what is said, and why."""
    names = _names(said)
    if all(name.endswith(FILE) for name in names):
        yield from ((name, "the file has its size") for name in SIZES)
    if "measured" in said:
        yield from ((name, "what was measured is drawn above what it would take") for name in TIMES)
    if "compare" in said:
        yield from ((name, "it is of one schedule, which --schedule names") for name in ("trace", "csv"))
        if not {*SEVERAL} & {*names}:
            yield "virtual", f"none of {' and '.join(SEVERAL)} is compared"
    if INTERLEAVED not in names:
        yield "group", f"it is of {INTERLEAVED}"
    if SEARCHED not in names:
        yield "memory", f"it is of {SEARCHED}"


def asked_for(arguments: argparse.Namespace) -> Drawing:
    """The timelines to draw.

    Raises:
        ScheduleError: when a schedule is refused or a file cannot be read.
    """
    if arguments.measured:
        return beside_measured(read_trace(arguments.measured))
    if arguments.compare:
        return Drawing(compared(arguments), None)
    return alone(arguments.schedule, arguments)


def compared(arguments: argparse.Namespace) -> dict[str, Timeline]:
    """Each schedule's timeline; what is refused is told and left out.

    Raises:
        ScheduleError: when nothing is left.
    """
    panels: dict[str, Timeline] = {}
    for name in _names(vars(arguments)):
        try:
            panels.update(alone(name, arguments).panels)
        except ScheduleError as error:
            tell(error, about=f"{name} is left out: ")
    if not panels:
        raise ScheduleError("none of these schedules can be drawn")
    return panels


def alone(name: str, arguments: argparse.Namespace) -> Drawing:
    """The timeline of one schedule; of a search its title tells which other one is the best, if one is.

    Raises:
        ScheduleError: when there is no such schedule, or it does not come to its end.
    """
    schedule = schedule_named(name, arguments)
    title = f"{name} ({schedule.name})" if name == SEARCHED != schedule.name else schedule.name
    costs = costs_of(arguments, len(schedule.ranks), schedule.stages)
    return Drawing({title: simulated(schedule, costs)}, schedule)


def schedule_named(name: str, arguments: argparse.Namespace) -> Schedule:
    """A schedule from its file, or of the size that the flags say.

    Raises:
        ScheduleError: when there is none.
    """
    if name.endswith(FILE):
        return Schedule.load(Path(name))
    ranks, microbatches = arguments.pipeline, arguments.microbatches
    chunks = stages_on_rank(name, arguments)
    if name == SEARCHED:
        return search(ranks, chunks, microbatches, costs_of(arguments, ranks, ranks * chunks), arguments.memory)
    return make(name, ranks, chunks, microbatches, arguments.group if name == INTERLEAVED else None)


def stages_on_rank(name: str, arguments: argparse.Namespace) -> int:
    """As many as the flags say, which in a comparison is for those that have several without being told."""
    if arguments.virtual and (name in SEVERAL or not arguments.compare):
        return arguments.virtual
    known = SCHEDULES.get(name)
    return 2 if name in SEVERAL else (known and known.chunks) or 1


def simulated(schedule: Schedule, costs: Costs) -> Timeline:
    """What the schedule does, proven to come to its end.

    Raises:
        ScheduleError: when it does not.
    """
    program = add_communication(schedule)
    validate(program)
    return simulate(program, costs)


def costs_of(arguments: argparse.Namespace, ranks: int, stages: int) -> Costs:
    """What the flags say of a rank, shared out equally among its stages, and so is what it holds."""
    share = ranks / stages
    given = {name: getattr(arguments, name) for name in TIMES}
    said = {name: TIMES[name] if value is None else value for name, value in given.items()}
    forward, input, weight = ((share * said[name],) * stages for name in "fiw")
    return Costs(forward, input, weight, said["latency"], said["transfer"], (share,) * stages, (share,) * stages)


def beside_measured(measured: Timeline) -> Drawing:
    """A measured timeline under the simulated one of the same actions, each as long as most like it.

    Raises:
        ScheduleError: when what was measured is no whole step.
    """
    schedule = Schedule(measured.name, tuple(tuple(i.action for i in rank) for rank in measured.intervals))
    share = (len(schedule.ranks) / schedule.stages,) * schedule.stages
    if not measured.activation:
        measured = replace(measured, activation=share, weight_memory=share)
    timeline = simulated(schedule, median_costs(measured, schedule.stages))
    panels = {f"{measured.name}, simulated": timeline, f"{measured.name}, measured": measured}
    return Drawing(panels, schedule, "seconds")


def median_costs(measured: Timeline, stages: int) -> Costs:
    """Seconds of each stage's actions, and of the transfers where they were measured: the median of each.

    B takes what its halves take where a stage has all three.
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
    return Costs(forward, input, weight, 0.0, transfer, measured.activation, measured.weight_memory)


def finish(drawing: Drawing, arguments: argparse.Namespace) -> None:
    """Print the numbers and write what is to be written; without a picture, draw on the terminal.

    Raises:
        ValueError: when the picture cannot be drawn.
        OSError: when something cannot be written.
    """
    print(table(drawing.panels))
    timelines = list(drawing.panels.values())
    if arguments.csv and drawing.schedule:
        drawing.schedule.save(arguments.csv)
    if arguments.trace:
        write_trace(timelines[0], arguments.trace)
    if arguments.out:
        with picture(arguments.out, *size(drawing.panels), grid=False) as figure:
            draw(figure, drawing.panels, drawing.unit, arguments.memory)
    elif not arguments.compare:
        width, color = shutil.get_terminal_size((120, 24)).columns, sys.stdout.isatty()
        clock = max(timeline.makespan for timeline in timelines)
        drawings = [f"{name}\n{drawn(timeline, width, color, clock)}" for name, timeline in drawing.panels.items()]
        print("", *drawings, legend(timelines), sep="\n")
    for path in filter(None, (arguments.csv, arguments.trace, arguments.out)):
        print(path)


def table(panels: Mapping[str, Timeline]) -> str:
    """A line of numbers for each timeline."""
    rows = [HEAD, *((name, *numbers(timeline)) for name, timeline in panels.items())]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    )
    return "\n".join(lines)


def numbers(timeline: Timeline) -> tuple[str, ...]:
    """The cells of a line: all peaks are those of the rank that holds the most."""
    peaks = (timeline.peak_memory, timeline.peak_activations, timeline.peak_weights)
    return (
        str(max(chunks_of(timeline).values(), default=0) + 1),
        number(timeline.makespan),
        number(timeline.span),
        f"{timeline.bubble:.1%}",
        f"{timeline.span_bubble:.1%}",
        *(number(max(peak, default=0)) for peak in peaks),
    )


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends quietly when nobody reads on
    sys.exit(main(sys.argv[1:]))
