"""Stop all ranks after the same step: on a signal to any of them, a time limit, or a file.

Other requests to a running job (`megatron.training.control`) travel in the same collective, so they cost nothing extra.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from megatron.config.files import read_small
from megatron.config.profiling import MAX_PROFILE_STEPS
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.training.control import (
    DEFAULT_PROFILE_STEPS,
    FILE_CHECK_SECONDS,
    NO_REQUEST,
    ControlFile,
    Requests,
)
from megatron.training.loggers.console import print_warning

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

TIME_LIMIT = 124
"""Exit status after ``exit_duration_in_mins``, the same as that of timeout(1)."""

STOP_FILE_FOUND = 1
"""Stop code if only the stop file stops the run; the exit status is 0, because launchers restart on any other."""

STOP_REQUESTED = 2
"""Stop code if the control file requests the stop; the exit status is 0, too."""

NO_DATA = 75
"""Exit status if an object store does not return the data of the next step: EX_TEMPFAIL of sysexits.h, try again."""

ECHO_SECONDS = 2.0
"""A second signal within this time is the same Ctrl-C: it reaches every process, and torchrun forwards it again."""


def exit_status(stop_code: int) -> int:
    """Return the exit status for a stop code."""
    return 0 if stop_code in (STOP_FILE_FOUND, STOP_REQUESTED) else stop_code


class HostCopy:
    """A small tensor on its way to the host, copied without waiting for the device."""

    def __init__(self, tensor: Tensor) -> None:
        """Start the copy."""
        self._event = None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = tensor.clone()

    def read(self) -> Any:
        """Return the values as Python numbers; wait for them if they have not arrived."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return self._values.tolist()


REQUEST_SIGNAL = signal.SIGUSR2
REQUEST_FILE = "PROFILE"
PIPELINE_REQUEST = "pipeline"
"""In the file, alone or before a number: request a timeline of the pipeline's actions instead of a profile."""


class StopRequest:
    """Record the first signal to this process, watch the time limit and the stop file; :meth:`poll` combines ranks.

    A second signal has its default effect, so that an impatient user can end the process. Other requests, by SIGUSR2 or
    files in the run folder, are read with it.
    """

    def __init__(
        self,
        world: Group,
        device: torch.device,
        minutes: float | None = None,
        since: float | None = None,
        file: str | None = None,
        run_dir: str | None = None,
    ) -> None:
        """Install the signal handlers. Rank 0 looks for files, because cluster file systems may be slow.

        Args:
            world: all ranks.
            device: this rank's device.
            minutes: time limit; None for none.
            since: start of the time limit on the clock of ``time.monotonic()``; None for now.
            file: stops the run once it exists.
            run_dir: folder for profiles, which may hold requests; None refuses them.
        """
        self.world = world
        self.device = device
        self.requests = NO_REQUEST  # those of the last :meth:`poll`, the same on every rank
        self.control = ControlFile(Path(run_dir)) if run_dir is not None and world.rank == 0 else None
        self._file = file if world.rank == 0 else None
        self._has_run_dir = run_dir is not None
        self._profile_file = Path(run_dir) / REQUEST_FILE if run_dir is not None and world.rank == 0 else None
        self._next_check = 0.0  # for the profile file, on the clock of ``time.monotonic()``
        self._profile_signalled = False
        self._late = device.type == "cuda"  # requests are read one call late, so that the host need not wait
        self._unread: list[HostCopy] = []
        since = time.monotonic() if since is None else since
        self._deadline = None if minutes is None else since + 60.0 * minutes
        self._signal = 0  # the first one received
        self._received = 0.0  # when
        self._without_data = False
        self._previous = {s: signal.signal(s, self._handle) for s in (*SIGNALS, REQUEST_SIGNAL)}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == REQUEST_SIGNAL:
            self._profile_signalled = True
        elif not self._signal:
            self._signal = number
            self._received = time.monotonic()
        elif time.monotonic() - self._received > ECHO_SECONDS:
            self.restore()
            signal.raise_signal(number)

    def stop_without_data(self, error: Exception) -> None:
        """Stop the run after this step because the data of the next one cannot be read."""
        if not self._without_data:
            self._without_data = True
            print_warning(f"this step is the last one, because the data of the next one cannot be read: {error}")

    def poll(self, now: bool = True) -> int:
        """Return the stop code, or 0 to continue; the same on every rank. Collective.

        128 + the highest signal number received by any rank, else ``TIME_LIMIT`` if it is over on any rank, else
        ``NO_DATA`` if a rank has called :meth:`stop_without_data`, else ``STOP_REQUESTED`` or ``STOP_FILE_FOUND`` if
        rank 0 finds such a file.
        With several GPUs, and not ``now``, it is that of the previous call. Give ``now`` alike on all ranks.
        """
        requests = self._local_requests()
        if self.world.size > 1:  # a single rank needs no tensor
            sent = torch.tensor(requests, pin_memory=self.device.type == "cuda").to(self.device, non_blocking=True)
            self._unread.append(HostCopy(comm.all_reduce(sent, self.world, op="max")))
            read, self._unread = (self._unread, []) if now or not self._late else (self._unread[:-1], self._unread[-1:])
            requests = [max(values) for values in zip([0, *NO_REQUEST], *(copy.read() for copy in read))]
        code, *others = requests
        self.requests = Requests(*others)
        return code

    def _local_requests(self) -> list[int]:
        """Return the stop code of this rank and its other requests since the last call."""
        code, requests = self.local_code(), self._local_profile_request()
        if self.control is not None:
            requests = Requests(*map(max, requests, self.control.read()))
            code = code or STOP_REQUESTED * self.control.stops
        return [code, *requests]

    def local_code(self) -> int:
        """Return the stop code of this rank."""
        if self._signal:
            return 128 + self._signal
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return TIME_LIMIT
        if self._without_data:
            return NO_DATA
        return STOP_FILE_FOUND if self._file is not None and os.path.exists(self._file) else 0

    def reason(self, code: int) -> str:
        """Return the human-readable reason for a stop code, on the rank that has the file."""
        if code == STOP_FILE_FOUND:
            return f"--stop-file {self._file}"
        if code == STOP_REQUESTED:
            return "a request in the control file"
        if code == TIME_LIMIT:
            return "--exit-duration-in-mins"
        if code == NO_DATA:
            return "an object store that does not return the data of the next step"
        return f"signal {code - 128} ({signal.Signals(code - 128).name})"

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _local_profile_request(self) -> Requests:
        """Return the requests to this rank since the last call; those of one kind are one with the most steps."""
        request = NO_REQUEST
        if self._profile_file is not None and time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + FILE_CHECK_SECONDS
            request = self._read_profile_file(self._profile_file)
        if self._profile_signalled:
            self._profile_signalled = False
            if self._has_run_dir:
                return request._replace(profile=max(DEFAULT_PROFILE_STEPS, request.profile))
            print_warning(f"{REQUEST_SIGNAL.name} requests a profile, which needs --run-dir; this run has none")
        return request

    def _read_profile_file(self, file: Path) -> Requests:
        """Read and remove the request file, if it exists."""
        try:
            text = read_small(file).decode(errors="replace").strip()
            file.unlink()
        except FileNotFoundError:
            return NO_REQUEST
        except OSError as error:
            print_warning(f"{file} is ignored from now on, because it cannot be read and removed: {error}")
            self._profile_file = None
            return NO_REQUEST
        number = text.removeprefix(PIPELINE_REQUEST).strip() or str(DEFAULT_PROFILE_STEPS)
        if number.isdecimal() and len(number) < 10 and 0 < int(number) <= MAX_PROFILE_STEPS:
            kind = "pipeline" if text.startswith(PIPELINE_REQUEST) else "profile"
            return NO_REQUEST._replace(**{kind: int(number)})
        rule = f"{REQUEST_FILE} may be empty, for {DEFAULT_PROFILE_STEPS} steps, or contain a number of steps up to"
        rule += f" {MAX_PROFILE_STEPS}, alone or after the word '{PIPELINE_REQUEST}'"
        print_warning(f"no profile: {rule}; it contains {text[:40]!r}")
        return NO_REQUEST
