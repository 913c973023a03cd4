"""Pipeline schedules: who computes what, in which order.

Every schedule of ``SCHEDULES`` is a function of the size of the pipeline that lists the actions of one rank; the rest
of the project takes them from there. Below, p is the number of ranks, v of stages on each (chunks), m of micro-batches;
f, b, i and w are the seconds that a *rank* takes for all its stages: one micro-batch forward, backward, and backward's
halves for inputs and for weights (b = i + w). The bubble is the longest time that a rank idles between its first and
its last action, all stages alike and communication free; memory is the most (stage, micro-batch) pairs whose
activations a rank holds at once, each a v-th of those of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from megatron.config.problems import did_you_mean
from megatron.pipeline.actions import BACKWARD, FORWARD, Action, Schedule, ScheduleError, Size
from megatron.pipeline.zero_bubble import dualpipe_v, zb_h1, zb_h2, zb_v


def gpipe(rank: int, size: Size) -> list[Action]:
    """Everything forward, then everything backward, stage by stage (breadth first).

    Backward takes the micro-batches in the order of forward. The reverse would free nothing earlier, and this way
    gradients are summed in the order of the other schedules, to the same bits.

    Bubble: (p - 1)(f + b) / v, with at least p micro-batches where v > 1. Memory: v m.

    Source: Huang et al., arXiv 1811.06965; with several stages on a rank, Lamy-Poirier, arXiv 2211.05953.
    """
    stages = range(rank, size.ranks * size.chunks, size.ranks)
    forwards = [Action(stage, FORWARD, mb) for stage in stages for mb in range(size.microbatches)]
    return forwards + [Action(stage, BACKWARD, mb) for stage in reversed(stages) for mb in range(size.microbatches)]


def one_forward_one_backward(rank: int, size: Size) -> list[Action]:
    """As few forwards as the first gradient needs to arrive, then one forward and one backward in turn.

    Bubble: (p - 1)(f + b). Memory: min(m, p - rank).

    Source: PipeDream-Flush, Narayanan et al., arXiv 2006.09503.
    """
    forwards = [Action(rank, FORWARD, mb) for mb in range(size.microbatches)]
    backwards = [Action(rank, BACKWARD, mb) for mb in range(size.microbatches)]
    return in_turn(forwards, backwards, warmup=size.ranks - rank - 1)


def interleaved(rank: int, size: Size) -> list[Action]:
    """1F1B over several stages on each rank: a group of micro-batches passes a stage, then the rank's next one.

    Bubble: (p - 1)(f + b) / v, with at least p micro-batches. Memory: min(v m, 2(p - rank - 1) + (v - 1) g + 1), g
    micro-batches in the first group.

    Source: Narayanan et al., arXiv 2104.04473; groups of other sizes than p as in Megatron-LM.
    """
    groups = list(depth_first_groups(size))
    stages = range(rank, size.ranks * size.chunks, size.ranks)
    forwards = [Action(stage, FORWARD, mb) for group in groups for stage in stages for mb in group]
    backwards = [Action(stage, BACKWARD, mb) for group in groups for stage in reversed(stages) for mb in group]
    return in_turn(forwards, backwards, warmup=2 * (size.ranks - rank - 1) + (size.chunks - 1) * len(groups[0]))


def in_turn(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    """``warmup`` forwards, one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    pairs = zip(forwards[warmup:], backwards, strict=False)
    return [*forwards[:warmup], *chain.from_iterable(pairs), *backwards[len(forwards) - warmup :]]


def depth_first_groups(size: Size) -> Iterator[range]:
    """The micro-batches of each group of the interleaved schedule.

    A rest that is no whole group makes a last, smaller one, as in Megatron-LM. One of fewer micro-batches than ranks
    would idle, or end in ranks that wait for each other: such a rest is shared out among the other groups.
    """
    full, rest = divmod(size.microbatches, size.group)
    if not full or rest >= size.ranks:
        lengths = [size.group] * full + [rest]
    else:
        lengths = [size.group + rest // full + (index < rest % full) for index in range(full)]
    start = 0
    for length in lengths:
        yield range(start, start + length)
        start += length


def one_by_one(placement: Sequence[int], microbatches: int = 1) -> Schedule:
    """Every micro-batch through all stages and back before the next: slow, and with one order over all ranks.

    Args:
        placement: the rank of every stage.
        microbatches: of the step.
    """
    ranks: list[list[Action]] = [[] for _ in range(1 + max(placement))]
    forth = [*enumerate(placement)]
    for mb in range(microbatches):
        for kind, way in ((FORWARD, forth), (BACKWARD, reversed(forth))):
            for stage, rank in way:
                ranks[rank].append(Action(stage, kind, mb))
    return Schedule("one by one", tuple(map(tuple, ranks)))


@dataclass(frozen=True)
class Recipe:
    """A schedule by name.

    Attributes:
        actions: of a rank in a pipeline of a size.
        chunks: stages that each rank must have; None where it may have any number.
        about: when to use it, in a sentence.
    """

    actions: Callable[[int, Size], list[Action]]
    chunks: int | None
    about: str


SCHEDULES: Mapping[str, Recipe] = {
    "gpipe": Recipe(gpipe, None, "All forwards, then all backwards: the most memory, the simplest picture."),
    "1f1b": Recipe(one_forward_one_backward, 1, "The least memory of a pipeline with one stage on a rank."),
    "interleaved": Recipe(interleaved, None, "1F1B with v stages on a rank: a v-th of the bubble."),
    "zb-h1": Recipe(zb_h1, 1, "A third of 1F1B's bubble, in its memory."),
    "zb-h2": Recipe(zb_h2, 1, "No bubble between a rank's first and last action, in twice the memory of 1F1B."),
    "zb-v": Recipe(zb_v, 2, "No bubble between a rank's first and last action, in the memory of 1F1B."),
    "dualpipe-v": Recipe(dualpipe_v, 2, "A forward next to a backward nearly always, few backwards in halves."),
}
"""The hand-written schedules."""


def make(name: str, ranks: int, chunks: int, microbatches: int, group: int | None = None) -> Schedule:
    """The schedule ``name`` of a pipeline.

    Args:
        name: one of ``SCHEDULES``.
        ranks: of the pipeline.
        chunks: stages on each rank.
        microbatches: of a step.
        group: of ``interleaved``: micro-batches that a stage takes before the rank's next one has its turn.
            Default: ``ranks``.

    Raises:
        ScheduleError: when there is no such schedule of this size.
    """
    if name not in SCHEDULES:
        guess = did_you_mean(name.lower(), SCHEDULES)
        fixes = [f"--pipeline-schedule {guess}"] if guess else []
        raise ScheduleError(f"no schedule is called '{name}'; there are {', '.join(SCHEDULES)}", *fixes)
    if min(ranks, chunks, microbatches) < 1:
        raise ScheduleError(
            f"a pipeline of {ranks} ranks, {chunks} stages on each and {microbatches} micro-batches: it takes at least "
            "one of each"
        )
    check_choice(name, ranks, chunks, group)
    size = Size(ranks, chunks, microbatches, group or ranks)
    return Schedule(name, tuple(tuple(SCHEDULES[name].actions(rank, size)) for rank in range(ranks)))


def check_choice(name: str, ranks: int, chunks: int, group: int | None) -> None:
    """Refuse stages on a rank that the schedule ``name`` cannot have, and groups that end in waiting.

    Raises:
        ScheduleError: naming the nearest choice.
    """
    needed = SCHEDULES[name].chunks
    if needed not in (None, chunks):
        raise ScheduleError(
            f"{name} has {needed} {'stage' if needed == 1 else 'stages'} on each rank, not {chunks}",
            f"--num-virtual-stages-per-pipeline-rank {needed}",
            *(["--pipeline-schedule interleaved"] if name == "1f1b" else []),
        )
    if group is not None and name != "interleaved":
        raise ScheduleError(
            f"{name} has no groups of micro-batches; interleaved has", "--pipeline-schedule interleaved"
        )
    if group is not None and group < ranks:
        raise ScheduleError(
            f"interleaved over {ranks} ranks with groups of {group} micro-batches: the first rank would wait for the "
            "last one; a group has at least as many micro-batches as the pipeline has ranks",
            f"--microbatch-group-size-per-virtual-pipeline-stage {ranks}",
        )
