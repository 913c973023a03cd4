"""Report a failure once: the error, the first rank that failed, and where every rank was.

The first rank to fail publishes its error, prints it with the pipeline action that every rank was at, writes
torchelastic's error file, which torchrun reports as the root cause, and appends a line to ``failures.jsonl`` in the
run's folder, for scripts that look for bad machines. Later errors are mostly consequences of the first, so other ranks
print nothing.

A rank blocked in a collective may stay blocked: gloo notices a dead peer within milliseconds, NCCL only after
``--distributed-timeout-minutes``, and Python runs signal handlers only once the collective returns. The thread of
``PeerWatchdog`` therefore publishes this rank's position, and ends the process if it gets SIGTERM while a peer is
dead. Launchers send SIGTERM to the other ranks of a machine when one dies, and torchrun restarts none of them before
all have exited. If all peers are alive, the run finishes its step and saves, as usual.
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from megatron.checkpoint.errors import CheckpointError, SupersededError
from megatron.config.errors import UserError
from megatron.config.launch import Launch
from megatron.config.privacy import check_access, redact
from megatron.config.text import echo, listed_ranks
from megatron.data.errors import DataError
from megatron.distributed.comm import Group
from megatron.distributed.launch import (
    FAILED_KEY,
    MissingRanksError,
    has_any_rank_failed,
    is_distributed_initialized,
    is_peer_lost,
    publish_text,
    read_texts,
    register_failure,
    world_group,
    write_error_file,
)
from megatron.distributed.places import PLACE
from megatron.pipeline.runtime import Pipeline
from megatron.training.first_cause import DISK_SECONDS, consequences, count_consequence, is_first_failure, within
from megatron.training.loggers.alerts import FAILURE, FAILURE_SECONDS, send_alert, start_alert
from megatron.training.loggers.console import print_warning
from megatron.training.loggers.run_folder import JsonLinesLogger, append_incident
from megatron.training.rank_log import claim_first_failure
from megatron.training.replicas.members import ReplicaError
from megatron.training.stall_watch import (
    REQUEST_KEY,
    StallWatch,
    await_report,
    current_stall,
    end_stuck_peers,
    is_peer_failed,
    mark_reported,
    save_stall,
)
from megatron.training.stalls import Stall

MAX_CAUSE_CHARS = 60
"""Characters quoted from a library's error message."""


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite, and ``--on-nonfinite`` is ``stop``."""


class CorruptionError(RuntimeError):
    """A step computed again gives other bits (``--replay-check``). Its device is recorded as failed already."""


class StalledError(RuntimeError):
    """Ranks wait for one that does not arrive, or have called different collectives."""

    def __init__(self, stall: Stall) -> None:
        """Create the error with the stall's sentence."""
        why = f"stalled for {PLACE.timeout / 60:g} minutes (--distributed-timeout-minutes)"
        super().__init__(f"{'ranks called different collectives' if stall.differ else why}: {stall.sentence}")
        self.stall = stall


class StartRefusedError(Exception):
    """The flags or files do not allow a start; raised from a ``UserError`` or ``DataError``, with its text."""


EXPECTED_ERRORS = (
    StartRefusedError,
    UserError,
    DataError,
    CheckpointError,
    NonFiniteError,
    CorruptionError,
    MissingRanksError,
    ReplicaError,
    StalledError,
)
"""Errors whose text is complete; others are printed with their traceback."""

ALERT_KINDS = (StalledError, "hang"), (CorruptionError, "corruption"), (NonFiniteError, "nonfinite")
"""Errors that are alerts of the kind of their incident, of which only one is sent."""

LOST_CONTACT = (
    "lost contact with another rank: it was killed, ran out of memory, or did not respond within "
    "--distributed-timeout-minutes; see the launcher's output for the cause"
)

FIRST_FAILURE_KEY = "first failure"
"""Key under which the first rank to fail publishes its error."""


def report_failure(
    error: Exception, run_dir: str | None = None, details: Callable[[Exception], str] | None = None
) -> bool:
    """Print an error, and append it to ``failures.jsonl`` in ``run_dir``; return False if another rank failed first.

    ``details`` returns a text to print last, when the error itself is recorded. Ignores SIGTERM meanwhile, which
    launchers send to all ranks as soon as one has exited.
    """
    launch = Launch.read(os.environ)
    rank = rank_label(launch, os.environ)
    in_main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN) if in_main else None
    try:
        if not is_first_failure(error):
            count_consequence(error, agreed=isinstance(error, EXPECTED_ERRORS))
            await_report()
            return False
        sentence = describe_error(error)  # before it is published: lost contact is described by what was
        publish_text(FIRST_FAILURE_KEY, f"{rank}: {sentence}")
        prefix = f"error on {rank}" if launch.world_size > 1 else "error"
        text = explain_error(error)
        echo(f"{prefix}: {text}", file=sys.stderr, flush=True)
        if (stall := stall_behind(error)) is not None and not stall.lost:  # gloo raises an error of its own
            alert = start_alert("hang", sentence, stall.step)
        else:
            kind = next((kind for known, kind in ALERT_KINDS if isinstance(error, known)), FAILURE)
            alert = start_alert(kind, f"{rank}: {sentence}")  # launchers do not wait for long
        if positions := rank_positions(launch.rank, launch.world_size):
            echo(positions, file=sys.stderr, flush=True)
        write_error_file(error, text)
        record_failure(run_dir, error, os.environ, sentence)
        if details is not None and (more := details(error)):
            echo(redact(more), file=sys.stderr, flush=True)
        several = launch.world_size > 1 and not isinstance(error, EXPECTED_ERRORS)
        if several and (after := consequences(error, launch.world_size, host_name(os.environ))):
            echo(after, file=sys.stderr, flush=True)
        mark_reported()
        if alert is not None:
            alert.join(FAILURE_SECONDS)
    finally:
        end_stuck_peers()
        if in_main:
            signal.signal(signal.SIGTERM, previous)
    return True


def explain_error(error: BaseException) -> str:
    """Return the text for the console, without credentials; with a traceback if the error is unexpected."""
    if isinstance(error, EXPECTED_ERRORS):
        text = "\n  ".join([str(error), *getattr(error, "__notes__", ())])
    elif is_peer_lost(error):
        text = lost_contact(error) or f"{LOST_CONTACT}\n  {error}"
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
    return redact(text)


def describe_error(error: BaseException) -> str:
    """Return one line for the records; after lost contact, the error that the lost rank published if there is one."""
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))  # such as the failing pipeline action
    if isinstance(error, EXPECTED_ERRORS):
        text = str(error)
    elif not is_peer_lost(error):
        text = f"{type(error).__name__}: {error}{notes}"
    elif not (text := read_texts([FIRST_FAILURE_KEY]).get(FIRST_FAILURE_KEY, "") or lost_contact(error)):
        # the last clause of the first line, such as "[file:line] Read error [address]: Connection reset by peer"
        line = next(iter(str(error).strip().splitlines()), "no reason is given")
        cause = re.sub(r" ?\[[^]]*\](:\d+)?", "", line).split(". ")[0].split(": ")[-1].strip(" .:")
        if len(cause) > MAX_CAUSE_CHARS:
            cause = f"{cause[:MAX_CAUSE_CHARS].rstrip()}..."
        text = f"{LOST_CONTACT} ({cause}){notes}"
    return redact(text)


TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)
"""In errors of collectives that have waited for the whole timeout."""


def stall_behind(error: BaseException) -> Stall | None:
    """Return the stall, or the end of a rank, that made torch.distributed raise ``error``; None if unknown."""
    if isinstance(error, StalledError):
        return error.stall
    if not is_peer_lost(error) or not is_distributed_initialized():
        return None
    launch = Launch.read(os.environ)
    stall = current_stall(world_group(launch.rank, launch.world_size))
    if stall is not None and {*stall.culprits} - stall.places.keys() and not TIMED_OUT.search(str(error)):
        return replace(stall, lost=True)  # it has ended, on another machine
    return stall


def lost_contact(error: BaseException) -> str:
    """Return which rank did not arrive, and where it and the others are; empty if unknown."""
    stall = stall_behind(error)
    if stall is None or not stall.places:
        return ""
    if stall.lost:
        return f"lost contact with another rank: {stall.sentence}; see the launcher's output for the cause"
    return str(StalledError(stall))


FAILURES_FILE = "failures.jsonl"

RECORD_TIMEOUT_SECONDS = 5.0
"""Seconds after which a write to a hanging disk is abandoned, so that the launcher sees the failure."""

FAILURE_KINDS = ("nonfinite", "out-of-memory", "device", "lost-contact", "data", "disk", "other")
NONFINITE, MEMORY, DEVICE, CONTACT, DATA, DISK, OTHER = FAILURE_KINDS

DEVICE_CODES, DISK_CODES = {"E207"}, {"E701", "E816"}
"""Errors at the start caused by the machine, not by flags: missing GPU; unwritable folder, full disk."""

KIND_OF_CLASS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...] = (
    (NonFiniteError, NONFINITE),
    (DataError, DATA),
    (CheckpointError, DISK),
    ((MemoryError, torch.OutOfMemoryError), MEMORY),
    ((ConnectionError, TimeoutError, ReplicaError, StalledError), CONTACT),
    (OSError, DISK),
)
KIND_OF_TEXT = (
    (re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE), MEMORY),
    # CUDA errors caused by the program, not by the device
    (re.compile(r"device-side assert|invalid (configuration )?argument|no kernel image", re.IGNORECASE), OTHER),
    (re.compile(r"CUDA (driver )?error|Cuda failure|unhandled cuda error|CU(BLAS|DNN)_STATUS|\bECC\b|\bXid\b"), DEVICE),
    # NCCL's failed system calls: the fault of this machine's network adapter unless they are about another machine
    (
        re.compile(
            r"\A(?!.*(remote|peer|connect|socket|timed? ?out|timeout)).*(ncclSystemError|unhandled system error)",
            re.IGNORECASE | re.DOTALL,
        ),
        DEVICE,
    ),
)
"""Kinds of errors by class, then by text; the first match counts."""


def failure_kind(error: BaseException) -> str:
    """Classify an error as one of ``FAILURE_KINDS``; ``device`` suggests that the machine is faulty."""
    cause = error.__cause__ if isinstance(error.__cause__, UserError | DataError) else error
    if isinstance(cause, UserError):
        codes = {problem.code for problem in cause.problems}
        return DEVICE if codes & DEVICE_CODES else DISK if codes & DISK_CODES else OTHER
    found = [kind for known, kind in KIND_OF_CLASS if isinstance(cause, known)]
    found += [kind for pattern, kind in KIND_OF_TEXT if pattern.search(str(cause))]
    if isinstance(cause, torch.AcceleratorError):
        found.append(DEVICE)
    return found[0] if found else CONTACT if is_peer_lost(cause) else OTHER


def host_name(environ: Mapping[str, str]) -> str:
    """Return this machine's name: Slurm's node name if there is one."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def rank_label(launch: Launch, environ: Mapping[str, str]) -> str:
    """Return ``rank R``, or ``rank R on HOST`` in a run on several machines."""
    if launch.launcher == "srun":
        multi_node = environ.get("SLURM_NNODES", "1") != "1"
    else:
        multi_node = launch.world_size > int(environ.get("LOCAL_WORLD_SIZE", launch.world_size))
    return f"rank {launch.rank} on {host_name(environ)}" if multi_node else f"rank {launch.rank}"


def record_failure(
    run_dir: str | None, error: BaseException, environ: Mapping[str, str], sentence: str | None = None
) -> None:
    """Append a line on the error of this rank, the first to fail, to ``run_dir/failures.jsonl``.

    A stall is recorded as an incident, too.

    Never raises, and never blocks for long. Writes nothing if the folder does not exist or a later start owns it.
    Before torch.distributed is initialised, rank 0 reports flag errors, which all ranks see. A missing device is
    reported by one rank of the machine under torchrun; under srun only the ranks without one fail, and all report.
    """
    if run_dir is None or isinstance(error, SupersededError | CorruptionError):
        return
    launch, kind = Launch.read(environ), failure_kind(error)
    reports_device = kind == DEVICE and (launch.local_rank == 0 or launch.launcher == "srun")
    if not (is_distributed_initialized() or launch.rank == 0 or reports_device):
        return
    stall = stall_behind(error)
    rank, host, local_rank = launch.rank, host_name(environ), launch.local_rank
    if stall is not None and stall.culprits:  # scripts look for bad machines
        rank = stall.culprits[0]
        host, local_rank = PLACE.hosts[rank]
    text = " ".join((sentence or describe_error(error)).split())
    line = {
        "time": time.time(),
        "rank": rank,
        "host": host,
        "local_rank": local_rank,
        "kind": kind,
        "sentence": text,
    }

    def write() -> None:
        if not os.path.isdir(run_dir):
            return
        with suppress(Exception):
            check_access(Path(run_dir), shared=True)
            file = JsonLinesLogger(Path(run_dir) / FAILURES_FILE, warn=lambda text: None)
            file.write(line)
            file.close()
            if stall is not None and not stall.lost:
                folder = save_stall(run_dir, stall)
                if any(folder.glob("rank_*.txt")):
                    echo(f"the stacks of the ranks: {folder}", file=sys.stderr, flush=True)
                append_incident(Path(run_dir), "hang", stall.step, text, folder)

    writer = threading.Thread(target=write, daemon=True)
    try:
        writer.start()
    except RuntimeError:  # no memory for a thread
        write()
    else:
        writer.join(RECORD_TIMEOUT_SECONDS)


POLL_SECONDS = 1.0
"""Seconds between two checks for a failed rank."""

PEER_POLL_SECONDS = 0.25
"""Seconds between two checks after SIGTERM."""

PEER_GRACE_SECONDS = 2.0
"""Seconds that a rank gets to report the lost peer itself before it is ended."""

WATCHDOG_ALERT_SECONDS = 5.0
"""Seconds that it waits for its alert."""
STUCK_SECONDS = 4.0
"""Seconds without progress after which a rank is ended when another has failed."""

EXIT_SIGTERM = 128 + signal.SIGTERM
PROC = Path("/proc")
PROC_SELF = PROC / "self"


class PeerWatchdog:
    """Thread that acts for a rank that may be blocked in a collective. Use as a context, in the main thread.

    It ends the process within seconds of SIGTERM if a peer is dead. It also publishes the rank's position: at once if
    the rank fails inside the context, else as soon as another one has failed. A single rank has no watchdog.
    """

    def __init__(self, world: Group, pipeline: Pipeline | None = None, run_dir: str | None = None) -> None:
        """Watch the ranks of ``world``, publish the position in ``pipeline``, and record a stall in ``run_dir``."""
        self._world, self._pipeline, self._run_dir = world, pipeline, run_dir
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        """Start the thread; all peers on this machine must be running."""
        if self._world.size > 1:
            self._local_peers = running_peers()
            self._receiver, self._sender = socket.socketpair()
            self._sender.setblocking(False)
            self._previous = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
            self._stalls = StallWatch(self._world)
            self._thread = threading.Thread(target=self._watch, name="peer watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._world.size > 1:
            self._stopped.set()
            signal.set_wakeup_fd(self._previous)
            self._sender.close()  # wakes the thread
            self._thread.join(POLL_SECONDS)  # at most: it may be blocked on a store that no longer answers
            self._stalls.close(failed=error is not None)
            if error is not None:
                self._publish_position()

    def _watch(self) -> None:
        try:
            self._watch_ranks()
        except Exception as error:  # such as no memory for a thread
            # the timers would end a run that makes progress
            self._stalls.close(failed=False)
            print_warning(f"rank {self._world.rank} is no longer watched for stalls: {type(error).__name__}: {error}")

    def _watch_ranks(self) -> None:
        """Publish the position once a rank has failed; end the process if it would wait for a rank that is gone."""
        published = terminated = False
        awaited = {FAILED_KEY, REQUEST_KEY}  # of the store
        exit_at = failed_at = math.inf
        with self._receiver:
            while time.monotonic() < exit_at:
                self._receiver.settimeout(PEER_POLL_SECONDS if terminated else min(POLL_SECONDS, self._stalls.interval))
                with suppress(TimeoutError):
                    terminated |= signal.SIGTERM in self._receiver.recv(4096)
                if self._stopped.is_set():
                    return
                self._stalls.poll()
                found = read_texts([*awaited]) if awaited else {}
                awaited -= found.keys()
                if REQUEST_KEY in found:
                    self._stalls.answer()
                if FAILED_KEY in found:
                    self._publish_position()
                    published = True
                if failed_at == math.inf and (published or is_peer_failed()):
                    failed_at = time.monotonic()
                if (stall := self._stalls.find()) is not None:
                    self._end_stalled(StalledError(stall))
                if min(time.monotonic() - failed_at, self._stalls.still) > STUCK_SECONDS:
                    self._end_stuck()
                if terminated and exit_at == math.inf and self.is_peer_gone():
                    exit_at = time.monotonic() + PEER_GRACE_SECONDS
        if register_failure() and within(DISK_SECONDS, claim_first_failure, True):
            echo(f"error on rank {self._world.rank}: {LOST_CONTACT}", file=sys.stderr, flush=True)
            send_alert(FAILURE, f"rank {self._world.rank}: {LOST_CONTACT}", WATCHDOG_ALERT_SECONDS)
        os._exit(EXIT_SIGTERM)

    def _end_stalled(self, error: StalledError) -> None:
        """Report a stall in which the main thread stays, unless another rank does, and end the process."""
        if not self._stopped.is_set():
            report_failure(error, self._run_dir)
            os._exit(1)

    def _end_stuck(self) -> None:
        """End the process after another rank's failure: the main thread does not get to a collective that raises."""
        await_report()
        if not self._stopped.is_set():
            end_stuck_peers()
            os._exit(1)

    def is_peer_gone(self) -> bool:
        """Return True if a local peer has exited, a rank has published a failure, or the store does not answer."""
        return not self._local_peers <= running_peers() or has_any_rank_failed()

    def _publish_position(self) -> None:
        if self._pipeline is not None:
            publish_text(POSITION_KEY.format(self._world.rank), str(self._pipeline.at or OTHER_WORK))


def running_peers() -> set[int]:
    """Return the ids of running processes with this one's parent and command line; empty without ``/proc``."""
    found = set()
    for path in PROC.glob("[0-9]*"):
        with suppress(OSError):  # the process has just ended
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            # the command line of a zombie is empty
            if parent == os.getppid() and (path / "cmdline").read_bytes() == (PROC_SELF / "cmdline").read_bytes():
                found.add(int(path.name))
    return found


POSITION_KEY = "place of rank {}"
POSITION_TIMEOUT_SECONDS = 2.0
"""Seconds that the first rank to fail waits for the positions of the others."""

OTHER_WORK = "other work"
"""Position of a rank outside its pipeline."""

MAX_RANKS_LISTED = 16
"""Ranks listed per position."""


def rank_positions(rank: int, world_size: int) -> str:
    """Return a line with the position of each rank, for a failure report; empty if none is in a pipeline.

    Waits a few seconds for ranks that have not published theirs; the position of dead ranks stays unknown.
    """
    keys = [POSITION_KEY.format(r) for r in range(world_size)]
    if not read_texts([keys[rank]]):
        return ""
    deadline = time.monotonic() + POSITION_TIMEOUT_SECONDS
    while len(found := read_texts(keys)) < world_size and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks_at: dict[str, list[int]] = defaultdict(list)
    for r, key in enumerate(keys):
        ranks_at[found.get(key, "no answer")].append(r)
    if [*ranks_at] == [OTHER_WORK]:
        return ""
    phrases = [f"{place} ({listed_ranks(ranks, MAX_RANKS_LISTED)})" for place, ranks in ranks_at.items()]
    return "the ranks were at: " + ", ".join(phrases)
