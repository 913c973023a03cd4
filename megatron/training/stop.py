"""Stop all ranks after the same step: on a signal to any of them, a time limit, or a file.

Requests for a profile travel in the same collective, so they cost nothing extra.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

import torch

from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.host_memory import HostCopy
from megatron.training.callbacks.profiler import NO_REQUEST, ProfileRequest, ProfileRequestListener

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

TIME_LIMIT = 124
"""Exit status after ``exit_duration_in_mins``, the same as that of timeout(1)."""

STOP_FILE_FOUND = 1
"""Stop code if only the stop file stops the run; the exit status is 0, because launchers restart on any other."""

ECHO_SECONDS = 2.0
"""A second signal within this time is the same Ctrl-C: it reaches every process, and torchrun forwards it again."""


def exit_status(stop_code: int) -> int:
    """Return the exit status for a stop code."""
    return 0 if stop_code == STOP_FILE_FOUND else stop_code


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
        profiles: ProfileRequestListener | None = None,
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
        self.profile_request = NO_REQUEST  # the profile request of the last :meth:`poll`, the same on every rank
        self._file = file
        self._late = device.type == "cuda"  # requests are read one call late, so that the host need not wait
        self._unread: list[HostCopy] = []
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

    def poll(self, now: bool = True) -> int:
        """Return the stop code, or 0 to continue; the same on every rank. Collective.

        128 + the highest signal number received by any rank, else ``TIME_LIMIT`` if it is over on any rank, else
        ``STOP_FILE_FOUND`` if any rank sees the file. With several GPUs, and not ``now``, it is that of the previous
        call. Give ``now`` alike on all ranks.
        """
        requests = [self.local_code(), *(NO_REQUEST if self.profiles is None else self.profiles.take())]
        if self.world.size > 1:  # a single rank needs no tensor
            sent = torch.tensor(requests, pin_memory=self.device.type == "cuda").to(self.device, non_blocking=True)
            self._unread.append(HostCopy(comm.all_reduce(sent, self.world, op="max")))
            read, self._unread = (self._unread, []) if now or not self._late else (self._unread[:-1], self._unread[-1:])
            requests = [max(values) for values in zip([0, *NO_REQUEST], *(copy.read() for copy in read))]
        code, *profiles = requests
        self.profile_request = ProfileRequest(*profiles)
        return code

    def local_code(self) -> int:
        """Return the stop code of this rank."""
        if self._signal:
            return 128 + self._signal
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return TIME_LIMIT
        return STOP_FILE_FOUND if self._file is not None and os.path.exists(self._file) else 0

    def reason(self, code: int) -> str:
        """Return the human-readable reason for a stop code, on the rank that has the file."""
        if code == STOP_FILE_FOUND:
            return f"--stop-file {self._file}"
        if code == TIME_LIMIT:
            return "--exit-duration-in-mins"
        return f"signal {code - 128} ({signal.Signals(code - 128).name})"

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self.profiles is not None:
            self.profiles.restore()
