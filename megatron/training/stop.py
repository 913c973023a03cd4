"""Ending a run in good order: a signal to any rank stops all of them after the same step."""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch

from megatron.parallel import comm
from megatron.parallel.comm import Group

SIGNALS = (signal.SIGTERM, signal.SIGINT)

ECHO_SECONDS = 2.0
"""Ctrl-C reaches every process of a terminal, and then torchrun passes it on: within this time it is the same one."""


class StopRequest:
    """Remembers the first signal this process got; :meth:`agreed` asks all ranks.

    A later one does what it did before, so that an impatient user gets through.
    """

    def __init__(self, world: Group, device: torch.device) -> None:
        self.world, self.device = world, device
        self._got, self._since = 0, 0.0
        self._previous = {s: signal.signal(s, self._handle) for s in SIGNALS}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._got:
            self._got, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > ECHO_SECONDS:
            self.restore()
            signal.raise_signal(number)

    def agreed(self) -> int:
        """The signal that any rank got (the highest number), or 0; the same answer on every rank. Collective."""
        mine = torch.tensor(float(self._got), device=self.device)
        return int(comm.all_reduce(mine, self.world, op="max").item())

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
