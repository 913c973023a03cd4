"""Pipeline schedules: which rank computes what, in which order.

Every schedule in ``SCHEDULES`` is a function that lists the actions of one rank; nothing else depends on a particular
schedule. Below, p is the number of ranks, v of stages on each (chunks), m of micro-batches; f, b, i and w are the
seconds of a *rank* for all its stages and one micro-batch: forward, backward, and backward's halves for inputs and
for weights (b = i + w). The bubble is the longest time that a rank idles between its first and its last action, with
equal stages and free communication. Memory is the maximum number of (stage, micro-batch) pairs whose activations a
rank holds, each a v-th of those of its layers.

Zero-bubble schedules run gradients of inputs (I) at once and fill idle time with gradients of weights (W);
activations are kept until W is done. In a V each rank has two stages, ``rank`` and ``2p - 1 - rank``, so that the
first rank also computes the loss and the last one passes its output to itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from megatron.config.text import did_you_mean
from megatron.pipeline.actions import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    PipelineSchedule,
    ScheduleError,
    ScheduleSize,
)


def gpipe(rank: int, size: ScheduleSize) -> list[Action]:
    """Build GPipe: all forwards, then all backwards, stage by stage (breadth first).

    Backwards run in the order of the forwards: the reverse would free no memory earlier, and this order sums gradients
    like the other schedules, bit for bit.

    Bubble: (p - 1)(f + b) / v, with at least p micro-batches where v > 1. Memory: v m.

    Source: Huang et al., arXiv 1811.06965; with several stages on a rank, Lamy-Poirier, arXiv 2211.05953.
    """
    stages = range(rank, size.ranks * size.chunks, size.ranks)
    forwards = [Action(stage, FORWARD, mb) for stage in stages for mb in range(size.microbatches)]
    return forwards + [Action(stage, BACKWARD, mb) for stage in reversed(stages) for mb in range(size.microbatches)]


def one_forward_one_backward(rank: int, size: ScheduleSize) -> list[Action]:
    """Build 1F1B: forwards until the first gradient arrives, then one forward and one backward in turn.

    Bubble: (p - 1)(f + b). Memory: min(m, p - rank).

    Source: PipeDream-Flush, Narayanan et al., arXiv 2006.09503.
    """
    forwards = [Action(rank, FORWARD, mb) for mb in range(size.microbatches)]
    backwards = [Action(rank, BACKWARD, mb) for mb in range(size.microbatches)]
    return alternate(forwards, backwards, warmup=size.ranks - rank - 1)


def interleaved(rank: int, size: ScheduleSize) -> list[Action]:
    """Build 1F1B over several stages per rank: a group of micro-batches passes a stage, then the rank's next one.

    Bubble: (p - 1)(f + b) / v, with at least p micro-batches. Memory: min(v m, 2(p - rank - 1) + (v - 1) g + 1), g
    micro-batches in the first group.

    Source: Narayanan et al., arXiv 2104.04473; groups of other sizes than p as in Megatron-LM.
    """
    groups = list(microbatch_groups(size))
    stages = range(rank, size.ranks * size.chunks, size.ranks)
    forwards = [Action(stage, FORWARD, mb) for group in groups for stage in stages for mb in group]
    backwards = [Action(stage, BACKWARD, mb) for group in groups for stage in reversed(stages) for mb in group]
    return alternate(forwards, backwards, warmup=2 * (size.ranks - rank - 1) + (size.chunks - 1) * len(groups[0]))


def forward_only(placement: Sequence[int], microbatches: int) -> PipelineSchedule:
    """Return the forwards of an evaluation with any number of micro-batches, for stages on the ranks ``placement``.

    As in the interleaved schedule, a group of micro-batches passes a stage, then the rank's next one. All ranks follow
    one order of all actions, in which every input precedes its use, so that no ranks wait for each other.
    """
    ranks = max(placement) + 1
    actions: list[list[Action]] = [[] for _ in range(ranks)]
    for first in range(0, microbatches, ranks):
        for stage, rank in enumerate(placement):
            group = range(first, min(first + ranks, microbatches))
            actions[rank] += (Action(stage, FORWARD, microbatch) for microbatch in group)
    return PipelineSchedule("forward-only", tuple(map(tuple, actions)))


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    """Return ``warmup`` forwards, then one forward and one backward alternating, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    pairs = zip(forwards[warmup:], backwards, strict=False)
    return [*forwards[:warmup], *chain.from_iterable(pairs), *backwards[len(forwards) - warmup :]]


def microbatch_groups(size: ScheduleSize) -> Iterator[range]:
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


class ActionList:
    """Builder for the actions of one rank; each action takes the stage's next micro-batch of its kind.

    Micro-batches beyond those of the step are skipped, so a schedule for many also serves for few.
    """

    def __init__(self, microbatches: int) -> None:
        self.actions: list[Action] = []
        self._microbatches = microbatches
        self._next: dict[tuple[int, str], int] = defaultdict(int)  # micro-batch by stage and kind

    def add(self, stage: int, *kinds: str, times: int = 1) -> None:
        """Append one action of each of ``kinds``, ``times`` times. A whole backward counts as both of its halves."""
        for kind in kinds * times:
            microbatch = self._next[stage, INPUT if kind == BACKWARD else kind]
            for counted in (INPUT, WEIGHT) if kind == BACKWARD else (kind,):
                self._next[stage, counted] += 1
            if microbatch < self._microbatches:
                self.actions.append(Action(stage, kind, microbatch))


def zb_h1(rank: int, size: ScheduleSize) -> list[Action]:
    """Build ZB-H1: 1F1B in which later ranks delay W longer, so that all hold as many micro-batches as the first.

    Bubble: (p - 1)(f + i - w) where w <= f, w <= i and m >= p. Memory: min(m, p) on every rank.

    Source: Qi et al., arXiv 2401.10241, section 2.3.
    """
    order = ActionList(size.microbatches)
    order.add(rank, FORWARD, times=size.ranks - rank - 1)
    for done in range(size.microbatches):
        order.add(rank, FORWARD)
        order.add(rank, INPUT)
        if done >= rank:
            order.add(rank, WEIGHT)
    order.add(rank, WEIGHT, times=rank)
    return order.actions


def zb_h2(rank: int, size: ScheduleSize) -> list[Action]:
    """Build ZB-H2: twice the warm-up of ZB-H1, so that no rank idles between its first and last action.

    The last 2 ``rank`` forwards run without a W in between, like the first ones: earlier ranks have no forwards left
    and wait for gradients. The delayed W run in the middle, except one that fills the gap between a rank's last
    forward and the next gradient.

    Bubble: (p - 1)(f + i - 2w), or none, where w <= f, w <= i and m >= 2p - 1. Memory: min(m, 2p - 1) on every rank.

    Source: Qi et al., arXiv 2401.10241, section 2.3.
    """
    order = ActionList(size.microbatches)
    warmup, delayed, kept = 2 * (size.ranks - rank - 1), 2 * rank, min(rank, 1)
    later = max(0, size.microbatches - warmup - delayed)
    order.add(rank, FORWARD, times=warmup)
    order.add(rank, FORWARD, INPUT, times=delayed)
    order.add(rank, WEIGHT, times=min(later, delayed) - kept)
    order.add(rank, FORWARD, INPUT, WEIGHT, times=later - delayed)
    order.add(rank, FORWARD, INPUT, times=min(later, delayed))
    order.add(rank, WEIGHT, times=kept)
    order.add(rank, INPUT, WEIGHT, times=warmup)
    order.add(rank, WEIGHT, times=delayed)
    return order.actions


def zb_v(rank: int, size: ScheduleSize) -> list[Action]:
    """Build ZB-V: two stages per rank in a V, with no bubble in the memory of 1F1B.

    Bubble: none where f = i = w and m >= 2p - 1. Memory: min(2m, 2p), each half of a rank's layers.

    Source: Qi et al., arXiv 2401.10241, section 6; as the V-ZB of Qi et al., arXiv 2405.15362.
    """
    order, down, up = ActionList(size.microbatches), rank, 2 * size.ranks - 1 - rank
    # Warm-up: when the first micro-batch returns, the second stage runs its forward and backward at once.
    order.add(down, FORWARD, times=2 * (size.ranks - rank) - 1)
    for _ in range(rank):
        order.add(up, FORWARD)
        order.add(down, FORWARD)
    order.add(up, FORWARD, INPUT, WEIGHT, times=size.ranks - rank)
    # Steady state: both stages alternate.
    for _ in range(max(size.ranks - 1, size.microbatches - size.ranks)):
        order.add(down, FORWARD, INPUT, WEIGHT)
        order.add(up, FORWARD, INPUT, WEIGHT)
    # Gradients first, because earlier ranks wait for them; the delayed W fill the end.
    for _ in range(rank):
        order.add(down, INPUT)
        order.add(up, INPUT)
    order.add(down, INPUT, WEIGHT, times=size.ranks - rank)
    order.add(up, WEIGHT, times=rank)
    order.add(down, WEIGHT, times=rank)
    return order.actions


def dualpipe_v(rank: int, size: ScheduleSize) -> list[Action]:
    """Build DualPipe-V: nearly every forward is next to a backward of the rank's other stage.

    DualPipe computes such a pair at the same time to overlap communication; here they are two actions in a row.
    Backwards are whole, except for the first of the loss's half and the last of both.

    Bubble: (p - 1)(f + i - w) / 2 where w <= i <= f <= b and m >= 2p; its authors assume that a pair takes less time
    than its parts. Memory: min(2m, 2p + 1), each half of a rank's layers.

    Source: DeepSeek-AI, arXiv 2412.19437, section 3.2.1, and its repository DualPipe; cut in half by Sea AI Lab.
    """
    order, down, up = ActionList(size.microbatches), rank, 2 * size.ranks - 1 - rank
    behind = size.ranks - 1 - rank
    # Warm-up, until gradients reach the rank's second stage, then its first one.
    order.add(down, FORWARD, times=2 * behind)
    for _ in range(rank + 1):
        order.add(down, FORWARD)
        order.add(up, FORWARD)
    order.add(up, INPUT, WEIGHT, FORWARD, times=behind)
    # Alternate forwards and backwards while there are forwards.
    for _ in range(max(0, size.microbatches - 2 * size.ranks) + rank + 1):
        order.add(down, FORWARD)
        order.add(up, BACKWARD)
        order.add(up, FORWARD)
        order.add(down, BACKWARD)
    for _ in range(behind):
        order.add(up, BACKWARD, FORWARD)
        order.add(down, BACKWARD)
    # Backwards: whole ones, then halves, with W between the last gradients.
    last = [up, down] * (rank + 1)
    whole, halves = last[: rank + 1], last[rank + 1 :]
    for stage in whole:
        order.add(stage, BACKWARD)
    for stage in halves:
        order.add(stage, INPUT)
    remaining = [*halves, *[down] * behind]
    for stage in remaining[:behind]:
        order.add(stage, WEIGHT)
        order.add(down, INPUT)
    for stage in remaining[behind:]:
        order.add(stage, WEIGHT)
    return order.actions


def sequential_schedule(placement: Sequence[int], microbatches: int = 1) -> PipelineSchedule:
    """Return a schedule that runs one micro-batch at a time through all stages and back; slow, for tests and reference.

    ``placement`` is the rank of every stage.
    """
    ranks: list[list[Action]] = [[] for _ in range(1 + max(placement))]
    stages = list(range(len(placement)))
    for mb in range(microbatches):
        for kind, order in ((FORWARD, stages), (BACKWARD, stages[::-1])):
            for stage in order:
                ranks[placement[stage]].append(Action(stage, kind, mb))
    return PipelineSchedule("one by one", tuple(map(tuple, ranks)))


@dataclass(frozen=True)
class ScheduleSpec:
    """A named schedule."""

    actions: Callable[[int, ScheduleSize], list[Action]]  # actions of a rank in a pipeline of a given size
    chunks: int | None  # required stages per rank; None for any number
    about: str  # when to use it


SCHEDULES: Mapping[str, ScheduleSpec] = {
    "gpipe": ScheduleSpec(gpipe, None, "All forwards, then all backwards: the most memory, the simplest picture."),
    "1f1b": ScheduleSpec(one_forward_one_backward, 1, "The least memory of a pipeline with one stage on a rank."),
    "interleaved": ScheduleSpec(interleaved, None, "1F1B with v stages on a rank: a v-th of the bubble."),
    "zb-h1": ScheduleSpec(zb_h1, 1, "A third of 1F1B's bubble, in its memory."),
    "zb-h2": ScheduleSpec(zb_h2, 1, "No bubble between a rank's first and last action, in twice the memory of 1F1B."),
    "zb-v": ScheduleSpec(zb_v, 2, "No bubble between a rank's first and last action, in the memory of 1F1B."),
    "dualpipe-v": ScheduleSpec(dualpipe_v, 2, "A forward next to a backward nearly always, few backwards in halves."),
}
"""The hand-written schedules."""


def make_schedule(name: str, ranks: int, chunks: int, microbatches: int, group: int | None = None) -> PipelineSchedule:
    """Build the schedule ``name``.

    Args:
        name: one of ``SCHEDULES``.
        ranks: of the pipeline.
        chunks: stages on each rank.
        microbatches: of a step.
        group: of ``interleaved``: micro-batches that pass a stage before the rank's next stage. Default: ``ranks``.

    Raises:
        ScheduleError: if there is no such schedule of this size, or its groups deadlock; with the nearest valid choice.
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
    needed = SCHEDULES[name].chunks
    if needed not in (None, chunks):
        raise ScheduleError(
            f"{name} has {needed} {'stage' if needed == 1 else 'stages'} on each rank, not {chunks}",
            f"--num-virtual-stages-per-pipeline-rank {needed}",
            *(["--pipeline-schedule interleaved"] if name == "1f1b" else []),
        )
    if group is not None and name != "interleaved":
        sentence = f"{name} has no groups of micro-batches; interleaved has"
        raise ScheduleError(sentence, "--pipeline-schedule interleaved")
    if group is not None and group < ranks:
        raise ScheduleError(
            f"interleaved over {ranks} ranks with groups of {group} micro-batches: the first rank would wait for the "
            "last one; a group has at least as many micro-batches as the pipeline has ranks",
            f"--microbatch-group-size-per-virtual-pipeline-stage {ranks}",
        )
    size = ScheduleSize(ranks, chunks, microbatches, group or ranks)
    return PipelineSchedule(name, tuple(tuple(SCHEDULES[name].actions(rank, size)) for rank in range(ranks)))
