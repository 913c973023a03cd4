"""Ending a run in good order: a signal to any rank stops all of them after the same step."""

from __future__ import annotations

import signal
from types import FrameType

import torch

from megatron.parallel import comm
from megatron.parallel.comm import Group

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Remembers the first signal this process got; :meth:`agreed` asks all ranks.

    A second one is not caught, so that an impatient user gets through.
    """

    def __init__(self, world: Group, device: torch.device) -> None:
        self.world, self.device = world, device
        self._got = 0
        self._previous = {s: signal.signal(s, self._handle) for s in SIGNALS}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._got = number
        self.restore()

    def agreed(self) -> int:
        """The signal that any rank got (the highest number), or 0; the same answer on every rank. Collective."""
        mine = torch.tensor(float(self._got), device=self.device)
        return int(comm.all_reduce(mine, self.world, op="max").item())

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
