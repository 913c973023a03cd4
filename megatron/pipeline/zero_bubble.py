"""Schedules that do backward in halves: gradients of inputs (I) at once, those of weights (W) where a rank would idle.

Letters, bubble and memory as in :mod:`megatron.pipeline.schedules`. Activations live until W is done. In a V each rank
has two stages, ``rank`` on the way down and ``2p - 1 - rank`` on the way back, so that the first rank also computes
the loss, and the last one hands its output to itself.
"""

from __future__ import annotations

from collections import defaultdict

from megatron.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Size


def zb_h1(rank: int, size: Size) -> list[Action]:
    """1F1B whose ranks put off W the longer the later they are: all hold as many micro-batches as the first.

    Bubble: (p - 1)(f + i - w) where w <= f, w <= i and m >= p. Memory: min(m, p) on every rank.

    Source: Qi et al., arXiv 2401.10241, section 2.3.
    """
    line = Line(size.microbatches)
    line.add(rank, FORWARD, times=size.ranks - rank - 1)
    for done in range(size.microbatches):
        line.add(rank, FORWARD)
        line.add(rank, INPUT)
        if done >= rank:
            line.add(rank, WEIGHT)
    line.add(rank, WEIGHT, times=rank)
    return line.actions


def zb_h2(rank: int, size: Size) -> list[Action]:
    """Twice the warm-up of ZB-H1, so that no rank idles between its first and its last action.

    The last 2 ``rank`` forwards come without a W in between, as the first ones do: the ranks before this one have
    none left, and wait for gradients. What W is put off at first is done in the middle, but for one that fills the gap
    between a rank's last forward and the gradient that it needs next.

    Bubble: (p - 1)(f + i - 2w), or none, where w <= f, w <= i and m >= 2p - 1. Memory: min(m, 2p - 1) on every rank.

    Source: Qi et al., arXiv 2401.10241, section 2.3.
    """
    line, warmup, put_off, kept = Line(size.microbatches), 2 * (size.ranks - rank - 1), 2 * rank, min(rank, 1)
    later = max(0, size.microbatches - warmup - put_off)
    line.add(rank, FORWARD, times=warmup)
    line.add(rank, FORWARD, INPUT, times=put_off)
    line.add(rank, WEIGHT, times=min(later, put_off) - kept)
    line.add(rank, FORWARD, INPUT, WEIGHT, times=later - put_off)
    line.add(rank, FORWARD, INPUT, times=min(later, put_off))
    line.add(rank, WEIGHT, times=kept)
    line.add(rank, INPUT, WEIGHT, times=warmup)
    line.add(rank, WEIGHT, times=put_off)
    return line.actions


def zb_v(rank: int, size: Size) -> list[Action]:
    """Two stages on each rank, in a V: no bubble in the memory of 1F1B.

    Bubble: none where f = i = w and m >= 2p - 1. Memory: min(2m, 2p), each half of a rank's layers.

    Source: Qi et al., arXiv 2401.10241, section 6; as the V-ZB of Qi et al., arXiv 2405.15362.
    """
    line, down, up = Line(size.microbatches), rank, 2 * size.ranks - 1 - rank
    # Warm-up: the second stage starts, and goes back at once, when the first micro-batch has come round.
    line.add(down, FORWARD, times=2 * (size.ranks - rank) - 1)
    for _ in range(rank):
        line.add(up, FORWARD)
        line.add(down, FORWARD)
    line.add(up, FORWARD, INPUT, WEIGHT, times=size.ranks - rank)
    # Steady: both stages in turn.
    for _ in range(max(size.ranks - 1, size.microbatches - size.ranks)):
        line.add(down, FORWARD, INPUT, WEIGHT)
        line.add(up, FORWARD, INPUT, WEIGHT)
    # Gradients first: the ranks before this one wait for them. What W is put off fills the end.
    for _ in range(rank):
        line.add(down, INPUT)
        line.add(up, INPUT)
    line.add(down, INPUT, WEIGHT, times=size.ranks - rank)
    line.add(up, WEIGHT, times=rank)
    line.add(down, WEIGHT, times=rank)
    return line.actions


def dualpipe_v(rank: int, size: Size) -> list[Action]:
    """DualPipe cut in half: a forward stands next to a backward of the rank's other stage nearly always.

    DualPipe computes such a pair at once, to hide the communication of one behind the other; here they are two
    actions in a row. Whole backwards, except for the first of the loss's half and the last of both.

    Bubble: (p - 1)(f + i - w) / 2 where w <= i <= f <= b and m >= 2p; its authors count with pairs that take less time
    than their parts. Memory: min(2m, 2p + 1), each half of a rank's layers.

    Source: DeepSeek-AI, arXiv 2412.19437, section 3.2.1, and its repository DualPipe; cut in half by Sea AI Lab.
    """
    line, down, up = Line(size.microbatches), rank, 2 * size.ranks - 1 - rank
    behind = size.ranks - 1 - rank
    # Warm-up, until gradients have come back to the rank's second stage, then to its first one.
    line.add(down, FORWARD, times=2 * behind)
    for _ in range(rank + 1):
        line.add(down, FORWARD)
        line.add(up, FORWARD)
    line.add(up, INPUT, WEIGHT, FORWARD, times=behind)
    # A forward and a backward in turn, while there are forwards.
    for _ in range(max(0, size.microbatches - 2 * size.ranks) + rank + 1):
        line.add(down, FORWARD)
        line.add(up, BACKWARD)
        line.add(up, FORWARD)
        line.add(down, BACKWARD)
    for _ in range(behind):
        line.add(up, BACKWARD, FORWARD)
        line.add(down, BACKWARD)
    # Backwards: whole ones, then halves, with W between the last gradients to arrive.
    last = [up, down] * (rank + 1)
    whole, halves = last[: rank + 1], last[rank + 1 :]
    for stage in whole:
        line.add(stage, BACKWARD)
    for stage in halves:
        line.add(stage, INPUT)
    owed = [*halves, *[down] * behind]
    for stage in owed[:behind]:
        line.add(stage, WEIGHT)
        line.add(down, INPUT)
    for stage in owed[behind:]:
        line.add(stage, WEIGHT)
    return line.actions


class Line:
    """The actions of one rank while they are written down: each time a stage's next micro-batch of that kind.

    Micro-batches that the step does not have are left out: what is left of a schedule of many is one of few.

    Attributes:
        actions: so far.
    """

    def __init__(self, microbatches: int) -> None:
        self.actions: list[Action] = []
        self._microbatches = microbatches
        self._next: dict[tuple[int, str], int] = defaultdict(int)

    def add(self, stage: int, *kinds: str, times: int = 1) -> None:
        """``times`` over, one action of each of ``kinds``. A whole backward counts as both of its halves."""
        for kind in kinds * times:
            microbatch = self._next[stage, INPUT if kind == BACKWARD else kind]
            for counted in (INPUT, WEIGHT) if kind == BACKWARD else (kind,):
                self._next[stage, counted] += 1
            if microbatch < self._microbatches:
                self.actions.append(Action(stage, kind, microbatch))
