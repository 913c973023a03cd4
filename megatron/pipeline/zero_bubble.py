"""Zero-bubble schedules: gradients of inputs (I) run at once, gradients of weights (W) fill idle time.

Letters, bubble and memory as in :mod:`megatron.pipeline.schedules`. Activations are kept until W is done. In a V each
rank has two stages, ``rank`` and ``2p - 1 - rank``, so that the first rank also computes the loss and the last one
passes its output to itself.
"""

from __future__ import annotations

from collections import defaultdict

from megatron.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Size


def zb_h1(rank: int, size: Size) -> list[Action]:
    """Build ZB-H1: 1F1B in which later ranks delay W longer, so that all hold as many micro-batches as the first.

    Bubble: (p - 1)(f + i - w) where w <= f, w <= i and m >= p. Memory: min(m, p) on every rank.

    Source: Qi et al., arXiv 2401.10241, section 2.3.
    """
    order = Line(size.microbatches)
    order.add(rank, FORWARD, times=size.ranks - rank - 1)
    for done in range(size.microbatches):
        order.add(rank, FORWARD)
        order.add(rank, INPUT)
        if done >= rank:
            order.add(rank, WEIGHT)
    order.add(rank, WEIGHT, times=rank)
    return order.actions


def zb_h2(rank: int, size: Size) -> list[Action]:
    """Build ZB-H2: twice the warm-up of ZB-H1, so that no rank idles between its first and last action.

    The last 2 ``rank`` forwards run without a W in between, like the first ones: earlier ranks have no forwards left
    and wait for gradients. The delayed W run in the middle, except one that fills the gap between a rank's last
    forward and the next gradient.

    Bubble: (p - 1)(f + i - 2w), or none, where w <= f, w <= i and m >= 2p - 1. Memory: min(m, 2p - 1) on every rank.

    Source: Qi et al., arXiv 2401.10241, section 2.3.
    """
    order = Line(size.microbatches)
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


def zb_v(rank: int, size: Size) -> list[Action]:
    """Build ZB-V: two stages per rank in a V, with no bubble in the memory of 1F1B.

    Bubble: none where f = i = w and m >= 2p - 1. Memory: min(2m, 2p), each half of a rank's layers.

    Source: Qi et al., arXiv 2401.10241, section 6; as the V-ZB of Qi et al., arXiv 2405.15362.
    """
    order, down, up = Line(size.microbatches), rank, 2 * size.ranks - 1 - rank
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


def dualpipe_v(rank: int, size: Size) -> list[Action]:
    """Build DualPipe-V: nearly every forward is next to a backward of the rank's other stage.

    DualPipe computes such a pair at the same time to overlap communication; here they are two actions in a row.
    Backwards are whole, except for the first of the loss's half and the last of both.

    Bubble: (p - 1)(f + i - w) / 2 where w <= i <= f <= b and m >= 2p; its authors assume that a pair takes less time
    than its parts. Memory: min(2m, 2p + 1), each half of a rank's layers.

    Source: DeepSeek-AI, arXiv 2412.19437, section 3.2.1, and its repository DualPipe; cut in half by Sea AI Lab.
    """
    order, down, up = Line(size.microbatches), rank, 2 * size.ranks - 1 - rank
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


class Line:
    """Builder for the actions of one rank; each action takes the stage's next micro-batch of its kind.

    Micro-batches beyond those of the step are skipped, so a schedule for many also serves for few.
    """

    def __init__(self, microbatches: int) -> None:
        self.actions: list[Action] = []
        self._microbatches = microbatches
        self._next: dict[tuple[int, str], int] = defaultdict(int)

    def add(self, stage: int, *kinds: str, times: int = 1) -> None:
        """Append one action of each of ``kinds``, ``times`` times. A whole backward counts as both of its halves."""
        for kind in kinds * times:
            microbatch = self._next[stage, INPUT if kind == BACKWARD else kind]
            for counted in (INPUT, WEIGHT) if kind == BACKWARD else (kind,):
                self._next[stage, counted] += 1
            if microbatch < self._microbatches:
                self.actions.append(Action(stage, kind, microbatch))
