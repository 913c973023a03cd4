"""What communication costs a rank: how long it waits for the others, and how many bytes it sends them.

Bytes are those that a ring sends, the least that a collective can do with on most networks (Patarasuk and Yuan 2009),
whatever way the library takes: of a tensor of B bytes, on each of n ranks,

==============  ==========================  ========================================
operation       a rank sends                B
==============  ==========================  ========================================
all-reduce      2 B (n - 1) / n             the tensor
reduce-scatter  B (n - 1) / n               all addends of the rank
all-gather      B (n - 1) / n               the result
all-to-all      what is for other ranks
send            B                           the tensor
==============  ==========================  ========================================
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron.parallel.stopwatch import Stopwatch

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all-reduce", "reduce-scatter", "all-gather"
ALL_TO_ALL, SEND = "all-to-all", "send"


class Meter(Stopwatch):
    """Seconds of waiting by the axes of the grid, and bytes sent by axes and operation.

    Host and device are not waited for: bytes are counted when a collective is called. So a CUDA graph counts what it
    sends when it is recorded, and its replays nothing.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Begin at nothing."""
        super().__init__(names)
        self._sent: dict[tuple[str, str], float] = {}

    def sends(self, axes: str, operation: str, count: float) -> None:
        """Count ``count`` bytes, unless :meth:`paused`."""
        if self._running:
            self._sent[axes, operation] = self._sent.get((axes, operation), 0.0) + count

    def take_sent(self) -> dict[tuple[str, str], float]:
        """Bytes by axes and operation since the last call."""
        taken, self._sent = self._sent, {}
        return taken
