"""Stop all ranks after the same step, on a signal to any of them, a time limit, or a file.

Requests for a profile travel in the same collective, so they cost nothing extra.
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
"""Exit status after ``exit_duration_in_mins``, the same as that of timeout(1)."""

FILE_IS_THERE = 1
"""Stop code if only the stop file stops the run; :func:`exit_status` maps it to 0."""

ECHO_SECONDS = 2.0
"""A second signal within this time is the same Ctrl-C: it reaches every process, and torchrun forwards it again."""


class StopRequest:
    """Record the first signal to this process, watch the time limit and the stop file; :meth:`poll` combines ranks.

    A second signal has its default effect, so that an impatient user can end the process.
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
        """Install the signal handlers.

        Args:
            world: all ranks.
            device: this rank's device.
            minutes: time limit; None for none.
            since: start of the time limit on the clock of ``time.monotonic()``; None for now.
            profiles: profile requests to this rank; :meth:`restore` also restores their signal handler.
            file: stops the run once it exists. Give it to one rank only: cluster file systems may be slow.

        """
        self.world = world
        self.device = device
        self.profiles = profiles
        self.profile_request = NOTHING  # the profile request of the last :meth:`poll`, the same on every rank
        self._file = file
        since = time.monotonic() if since is None else since
        self._deadline = None if minutes is None else since + 60.0 * minutes
        self._signal = 0  # the first one received
        self._received = 0.0  # when
        self._previous = {s: signal.signal(s, self._handle) for s in SIGNALS}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._signal:
            self._signal = number
            self._received = time.monotonic()
        elif time.monotonic() - self._received > ECHO_SECONDS:
            self.restore()
            signal.raise_signal(number)

    def poll(self) -> int:
        """Return the stop code, or 0 to continue; the same on every rank. Collective.

        128 + the highest signal number received by any rank, else ``TIME_LIMIT`` if it is over on any rank, else
        ``STOP_FILE_FOUND`` if any rank sees the file.
        """
        request = self.profiles.take() if self.profiles is not None else NOTHING
        if self.world.size == 1:  # no tensor, so no synchronisation with the GPU
            self.profile_request = request
            return self._local_code()
        mine = torch.tensor((self._local_code(), *request), device=self.device)
        code, *requests = comm.all_reduce(mine, self.world, op="max").tolist()
        self.profile_request = Wish(*requests)
        return int(code)

    def _local_code(self) -> int:
        if self._signal:
            return 128 + self._signal
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return TIME_IS_UP
        return FILE_IS_THERE if self._file is not None and os.path.exists(self._file) else 0

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self.profiles is not None:
            self.profiles.restore()


def exit_status(stop_code: int) -> int:
    """Return the exit status for a stop code: 0 for the stop file, because launchers restart on any other status."""
    return 0 if stop_code == FILE_IS_THERE else stop_code


def reason(stop_code: int, file: str | None = None) -> str:
    """Return the human-readable reason for a stop code; ``file`` is the stop file."""
    if stop_code == FILE_IS_THERE:
        return f"--stop-file {file}"
    if stop_code == TIME_IS_UP:
        return "--exit-duration-in-mins"
    return f"signal {stop_code - 128} ({signal.Signals(stop_code - 128).name})"
