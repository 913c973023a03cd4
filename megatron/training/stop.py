"""What a running job is told: a signal to any rank, the clock, or a file stops all of them after the same step.

A profile that somebody asks for is agreed on in the same collective, so that it costs nothing until then.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

import torch

from megatron.parallel import comm
from megatron.parallel.comm import Group
from megatron.training.profile_request import NOTHING, ProfileRequests, Wish

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

TIME_IS_UP = 124
"""Exit status of a run that ``exit_duration_in_mins`` ended, as timeout(1) has it."""

FILE_IS_THERE = 1
"""What :meth:`StopRequest.agreed` answers where nothing but the file stops the run; see :func:`exit_status`."""

ECHO_SECONDS = 2.0
"""Ctrl-C reaches every process of a terminal, and then torchrun passes it on: within this time it is the same one."""


class StopRequest:
    """Remembers the first signal this process got, and watches the clock; :meth:`agreed` asks all ranks.

    A later signal does what it did before, so that an impatient user gets through.

    Attributes:
        wish: what somebody wants recorded of the next steps, as of the last :meth:`agreed`; the same on every rank.
    """

    def __init__(
        self,
        world: Group,
        device: torch.device,
        minutes: float | None = None,
        since: float | None = None,
        profiles: ProfileRequests | None = None,
        file: Path | None = None,
    ) -> None:
        """Listen from now on.

        Args:
            world: all ranks.
            device: this rank's.
            minutes: after which the run shall end; None for never.
            since: what ``time.monotonic()`` was when they began; None for now.
            profiles: what this rank is asked for; given back with :meth:`restore` too.
            file: stops the run once it is there; one rank that looks is enough, as a look may be slow on the file
                systems of clusters.

        """
        self.world, self.device, self.profiles, self.wish = world, device, profiles, NOTHING
        self._file = file
        since = time.monotonic() if since is None else since
        self._deadline = None if minutes is None else since + 60.0 * minutes
        self._got, self._since = 0, 0.0
        self._previous = {s: signal.signal(s, self._handle) for s in SIGNALS}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._got:
            self._got, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > ECHO_SECONDS:
            self.restore()
            signal.raise_signal(number)

    def agreed(self) -> int:
        """What stops the run now, or 0 to go on; the same answer on every rank. Collective.

        128 + the highest signal number that any rank got, else ``TIME_IS_UP`` where any rank's time is, else
        ``FILE_IS_THERE`` where any rank sees the file.
        """
        wanted = self.profiles.take() if self.profiles is not None else NOTHING
        if self.world.size == 1:  # a GPU alone need not be waited for
            self.wish = wanted
            return self._status()
        mine = torch.tensor((self._status(), *wanted), device=self.device)
        status, *all_want = comm.all_reduce(mine, self.world, op="max").tolist()
        self.wish = Wish(*all_want)
        return int(status)

    def _status(self) -> int:
        if self._got:
            return 128 + self._got
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return TIME_IS_UP
        return FILE_IS_THERE if self._file is not None and os.path.exists(self._file) else 0

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self.profiles is not None:
            self.profiles.restore()


def exit_status(told: int) -> int:
    """The status with which a run ends that :meth:`StopRequest.agreed` ``told`` to stop, or 0 where it did not.

    Of a file it is 0: launchers start ranks again that end with another one, and here nobody wants that.
    """
    return 0 if told == FILE_IS_THERE else told


def reason(told: int, file: str | None = None) -> str:
    """What made :meth:`StopRequest.agreed` answer ``told``, in words; ``file`` is the one that was looked for."""
    if told == FILE_IS_THERE:
        return f"--stop-file {file}"
    if told == TIME_IS_UP:
        return "--exit-duration-in-mins"
    return f"signal {told - 128} ({signal.Signals(told - 128).name})"
