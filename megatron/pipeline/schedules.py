"""Pipeline schedules: which rank computes what, in which order.

Every schedule in ``SCHEDULES`` is a function that lists the actions of one rank; nothing else depends on a particular
schedule. Below, p is the number of ranks, v of stages on each (chunks), m of micro-batches; f, b, i and w are the
seconds of a *rank* for all its stages and one micro-batch: forward, backward, and backward's halves for inputs and for
weights (b = i + w). The bubble is the longest time that a rank idles between its first and its last action, with equal
stages and free communication. Memory is the maximum number of (stage, micro-batch) pairs whose activations a rank
holds, each a v-th of those of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from megatron.config.problems import did_you_mean
from megatron.pipeline.actions import BACKWARD, FORWARD, Action, Schedule, ScheduleError, Size
from megatron.pipeline.zero_bubble import dualpipe_v, zb_h1, zb_h2, zb_v


def gpipe(rank: int, size: Size) -> list[Action]:
    """Build GPipe: all forwards, then all backwards, stage by stage (breadth first).

    Backwards run in the order of the forwards: the reverse would free no memory earlier, and this order sums gradients
    like the other schedules, bit for bit.

    Bubble: (p - 1)(f + b) / v, with at least p micro-batches where v > 1. Memory: v m.

    Source: Huang et al., arXiv 1811.06965; with several stages on a rank, Lamy-Poirier, arXiv 2211.05953.
    """
    stages = range(rank, size.ranks * size.chunks, size.ranks)
    forwards = [Action(stage, FORWARD, mb) for stage in stages for mb in range(size.microbatches)]
    return forwards + [Action(stage, BACKWARD, mb) for stage in reversed(stages) for mb in range(size.microbatches)]


def one_forward_one_backward(rank: int, size: Size) -> list[Action]:
    """Build 1F1B: forwards until the first gradient arrives, then one forward and one backward in turn.

    Bubble: (p - 1)(f + b). Memory: min(m, p - rank).

    Source: PipeDream-Flush, Narayanan et al., arXiv 2006.09503.
    """
    forwards = [Action(rank, FORWARD, mb) for mb in range(size.microbatches)]
    backwards = [Action(rank, BACKWARD, mb) for mb in range(size.microbatches)]
    return in_turn(forwards, backwards, warmup=size.ranks - rank - 1)


def interleaved(rank: int, size: Size) -> list[Action]:
    """Build 1F1B over several stages per rank: a group of micro-batches passes a stage, then the rank's next one.

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
    """Return ``warmup`` forwards, then one forward and one backward alternating, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    pairs = zip(forwards[warmup:], backwards, strict=False)
    return [*forwards[:warmup], *chain.from_iterable(pairs), *backwards[len(forwards) - warmup :]]


def depth_first_groups(size: Size) -> Iterator[range]:
    """Yield the micro-batches of each group of the interleaved schedule.

    A remainder forms a smaller last group, as in Megatron-LM. With fewer micro-batches than ranks it would idle or
    deadlock, so such a remainder is distributed over the other groups.
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
    """Return a schedule that runs one micro-batch at a time through all stages and back; slow, for tests and reference.

    Args:
        placement: rank of every stage.
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
    """A named schedule."""

    actions: Callable[[int, Size], list[Action]]  # actions of a rank in a pipeline of a given size
    chunks: int | None  # required stages per rank; None for any number
    about: str  # when to use it


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
    """Build the schedule ``name``.

    Args:
        name: one of ``SCHEDULES``.
        ranks: of the pipeline.
        chunks: stages on each rank.
        microbatches: of a step.
        group: of ``interleaved``: micro-batches that pass a stage before the rank's next stage. Default: ``ranks``.

    Raises:
        ScheduleError: if there is no such schedule of this size.
    """
    if name not in SCHEDULES:
        guess = did_you_mean(name.lower(), SCHEDULES)
        fixes = [f"--pipeline-schedule {guess}"] if guess else []
        raise ScheduleError(f"there is no schedule '{name}'; choose from {', '.join(SCHEDULES)}", *fixes)
    if min(ranks, chunks, microbatches) < 1:
        raise ScheduleError(
            f"a pipeline of {ranks} ranks, {chunks} stages on each and {microbatches} micro-batches: it needs at least "
            "one of each"
        )
    check_choice(name, ranks, chunks, group)
    size = Size(ranks, chunks, microbatches, group or ranks)
    return Schedule(name, tuple(tuple(SCHEDULES[name].actions(rank, size)) for rank in range(ranks)))


def check_choice(name: str, ranks: int, chunks: int, group: int | None) -> None:
    """Reject numbers of stages per rank that the schedule does not support, and groups that deadlock.

    Raises:
        ScheduleError: with the nearest valid choice.
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
