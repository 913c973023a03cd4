"""Communication cost of a rank: time blocked on other ranks, and bytes sent to them.

Bytes are those of a ring algorithm, which is bandwidth-optimal on most networks (Patarasuk and Yuan 2009), whichever
algorithm the library chooses. On each of n ranks, for a tensor of B bytes:

==============  ==========================  ========================================
operation       bytes sent by a rank        B
==============  ==========================  ========================================
all-reduce      2 B (n - 1) / n             the tensor
reduce-scatter  B (n - 1) / n               the rank's input
all-gather      B (n - 1) / n               the result
all-to-all      rows for other ranks
send            B                           the tensor
==============  ==========================  ========================================
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron.parallel.stopwatch import Stopwatch

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all-reduce", "reduce-scatter", "all-gather"
ALL_TO_ALL, SEND = "all-to-all", "send"


class Meter(Stopwatch):
    """Seconds blocked by axes of the rank grid, and bytes sent by axes and operation.

    Bytes are counted when a collective is called. So a CUDA graph counts once, when it is captured, and its replays
    count nothing.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Start at zero."""
        super().__init__(names)
        self._sent: dict[tuple[str, str], float] = {}

    def sends(self, axes: str, operation: str, count: float) -> None:
        """Add ``count`` bytes, unless paused."""
        if self._running:
            self._sent[axes, operation] = self._sent.get((axes, operation), 0.0) + count

    def take_sent(self) -> dict[tuple[str, str], float]:
        """Return bytes by axes and operation since the last call."""
        taken, self._sent = self._sent, {}
        return taken
