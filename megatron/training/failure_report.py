"""Report a failure: the error, the first rank that failed, and where every rank was.

The first rank to fail publishes its error, prints it with the pipeline action that every rank was at, and appends a
line to ``failures.jsonl`` in the run's folder, for scripts that look for bad machines. Later errors are mostly
consequences of the first, so other ranks print nothing.
"""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType

import torch

from megatron.checkpoint.errors import CheckpointError, SupersededError
from megatron.config.errors import UserError
from megatron.config.launch import Launch
from megatron.data.errors import DataError
from megatron.distributed.launch import FAILED_KEY, is_distributed_initialized, is_peer_lost, publish_text, read_texts
from megatron.distributed.mesh import Mesh
from megatron.distributed.timing import NO_SPAN
from megatron.pipeline.runtime import Pipeline
from megatron.training.loggers.run_folder import JsonLinesLogger

MAX_CAUSE_CHARS = 60
"""Characters quoted from a library's error message."""


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite, and ``--on-nonfinite`` is ``stop``."""


class StartRefusedError(Exception):
    """The flags or files do not allow a start; raised from a ``UserError`` or ``DataError``, with its text."""


EXPECTED_ERRORS = (StartRefusedError, UserError, DataError, CheckpointError, NonFiniteError)
"""Errors whose text is complete; others are printed with their traceback."""

LOST_CONTACT = (
    "lost contact with another rank: it was killed, ran out of memory, or did not respond within "
    "--distributed-timeout-minutes; see the launcher's output for the cause"
)

FIRST_FAILURE_KEY = "first failure"
"""Key under which the first rank to fail publishes its error."""


def explain_error(error: BaseException) -> str:
    """Return the text for the console; with a traceback if the error is unexpected."""
    if isinstance(error, EXPECTED_ERRORS):
        return "\n  ".join([str(error), *getattr(error, "__notes__", ())])
    if is_peer_lost(error):
        return f"{LOST_CONTACT}\n  {error}"
    return "".join(traceback.format_exception(error)).rstrip()


def describe_error(error: BaseException) -> str:
    """Return one line for the records; after lost contact, the error that the lost rank published if there is one."""
    if isinstance(error, EXPECTED_ERRORS):
        return str(error)
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))  # such as the failing pipeline action
    if not is_peer_lost(error):
        return f"{type(error).__name__}: {error}{notes}"
    return read_texts([FIRST_FAILURE_KEY]).get(FIRST_FAILURE_KEY) or f"{LOST_CONTACT} ({_cause(str(error))}){notes}"


def publish_error(error: BaseException, rank: str) -> None:
    """Publish this rank's error so that other ranks can report the root cause."""
    publish_text(FIRST_FAILURE_KEY, f"{rank}: {describe_error(error)}")


def _cause(text: str) -> str:
    """Return the last clause of the first line: ``[file:line] Read error [address]: Connection reset by peer``."""
    line = next(iter(text.strip().splitlines()), "no reason is given")
    clause = re.sub(r" ?\[[^]]*\](:\d+)?", "", line).split(". ")[0].split(": ")[-1].strip(" .:")
    return clause if len(clause) <= MAX_CAUSE_CHARS else f"{clause[:MAX_CAUSE_CHARS].rstrip()}..."


FAILURES_FILE = "failures.jsonl"

RECORD_TIMEOUT_SECONDS = 5.0
"""Seconds after which a hanging write is abandoned."""

NONFINITE, MEMORY, DEVICE, CONTACT = "nonfinite", "out-of-memory", "device", "lost-contact"
DATA, DISK, OTHER = "data", "disk", "other"
FAILURE_KINDS = (NONFINITE, MEMORY, DEVICE, CONTACT, DATA, DISK, OTHER)

KIND_OF_CODE = {"E207": DEVICE, "E701": DISK, "E816": DISK}
"""Errors at the start caused by the machine, not by flags: missing GPU, unwritable folder, full disk."""

OUT_OF_MEMORY_PATTERN = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)
PROGRAM_ERROR_PATTERN = re.compile(
    r"device-side assert|invalid (configuration )?argument|no kernel image", re.IGNORECASE
)
"""CUDA errors caused by the program, not by the device."""

DEVICE_ERROR_PATTERN = re.compile(
    r"CUDA (driver )?error|Cuda failure|unhandled cuda error|CU(BLAS|DNN)_STATUS|\bECC\b|\bXid\b"
)
ADAPTER_ERROR_PATTERN = re.compile(r"ncclSystemError|unhandled system error")
"""NCCL's failed system calls: the fault of this machine's network adapter unless the text matches ``PEER_PATTERN``."""

PEER_PATTERN = re.compile(r"remote|peer|connect|socket|timed? ?out|timeout", re.IGNORECASE)


def failure_kind(error: BaseException) -> str:
    """Classify an error as one of ``FAILURE_KINDS``; ``device`` suggests that the machine is faulty."""
    cause = error.__cause__ if isinstance(error.__cause__, UserError | DataError) else error
    if isinstance(cause, UserError):
        return next((KIND_OF_CODE[problem.code] for problem in cause.problems if problem.code in KIND_OF_CODE), OTHER)
    by_class = {
        NonFiniteError: NONFINITE,
        DataError: DATA,
        CheckpointError: DISK,
        MemoryError: MEMORY,
        torch.OutOfMemoryError: MEMORY,
        ConnectionError: CONTACT,
        TimeoutError: CONTACT,
        OSError: DISK,
    }
    return next((kind for known, kind in by_class.items() if isinstance(cause, known)), None) or _kind_of_text(cause)


def _kind_of_text(error: BaseException) -> str:
    """Classify an error by its message, where its class is not specific."""
    text = str(error)
    if OUT_OF_MEMORY_PATTERN.search(text):
        return MEMORY
    if PROGRAM_ERROR_PATTERN.search(text):
        return OTHER
    if isinstance(error, torch.AcceleratorError) or DEVICE_ERROR_PATTERN.search(text):
        return DEVICE
    if ADAPTER_ERROR_PATTERN.search(text) and not PEER_PATTERN.search(text):
        return DEVICE
    return CONTACT if is_peer_lost(error) else OTHER


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


def record_failure(run_dir: str | None, error: BaseException, environ: Mapping[str, str]) -> None:
    """Append a line on the error of this rank, the first to fail, to ``run_dir/failures.jsonl``.

    Never raises and never blocks for long. Writes nothing if the folder does not exist or a later start owns it.
    """
    launch = Launch.read(environ)
    if run_dir is None or isinstance(error, SupersededError) or not Path(run_dir).is_dir():
        return
    if not is_distributed_initialized() and not _is_reporter(launch, failure_kind(error)):
        return
    line = {
        "time": time.time(),
        "rank": launch.rank,
        "host": host_name(environ),
        "local_rank": launch.local_rank,
        "kind": failure_kind(error),
        "sentence": " ".join(describe_error(error).split()),
    }
    writer = threading.Thread(target=_append, args=(Path(run_dir) / FAILURES_FILE, line), daemon=True)
    writer.start()
    writer.join(RECORD_TIMEOUT_SECONDS)


def _is_reporter(launch: Launch, kind: str) -> bool:
    """Return True if this rank reports a failure that happens before torch.distributed is initialised.

    All ranks see the same flag errors, so rank 0 reports those. Missing devices are reported by one rank of the
    machine under torchrun; under srun only the ranks without a device fail, and each reports itself.
    """
    return launch.rank == 0 or (kind == DEVICE and (launch.local_rank == 0 or launch.launcher == "srun"))


def _append(path: Path, line: Mapping[str, object]) -> None:
    with suppress(Exception):
        file = JsonLinesLogger(path, warn=lambda text: None)
        file.write(line)
        file.close()


POLL_SECONDS = 1.0
"""Seconds between two checks for a failed rank."""

POSITION_TIMEOUT_SECONDS = 2.0
"""Seconds that the first rank to fail waits for the positions of the others."""

OTHER_WORK = "other work"
"""Position of a rank outside its pipeline."""

MAX_RANKS_LISTED = 16
"""Ranks listed per position."""


def publish_position_on_failure(mesh: Mesh, pipeline: Pipeline) -> AbstractContextManager[object]:
    """Publish this rank's position in ``pipeline`` if a rank fails inside; without pipeline parallelism do nothing."""
    if len(set(mesh.placement)) == 1:
        return NO_SPAN
    return PositionReporter(mesh.rank, lambda: str(pipeline.at or OTHER_WORK))


class PositionReporter:
    """Publish this rank's position: at once when this rank fails, else as soon as another one has failed.

    A thread checks for failed ranks, because the main thread may be blocked in a collective.
    """

    def __init__(self, rank: int, place: Callable[[], str]) -> None:
        """Start the thread.

        Args:
            rank: global rank of this process.
            place: returns its current position.
        """
        self._rank = rank
        self._place = place
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="position reporter", daemon=True)
        self._thread.start()

    def __enter__(self) -> PositionReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join(POLL_SECONDS)  # at most: it may be blocked on a store that no longer answers
        if error is not None:
            self._publish()

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            if read_texts([FAILED_KEY]):
                self._publish()
                return

    def _publish(self) -> None:
        publish_text(_key(self._rank), self._place())


@contextmanager
def ignore_sigterm() -> Iterator[None]:
    """Ignore SIGTERM, which launchers send to all ranks as soon as one has exited. Use in the main thread."""
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def rank_positions(rank: int, world_size: int) -> str:
    """Return a line with the position of each rank, for a failure report; empty if none is in a pipeline.

    Waits a few seconds for ranks that have not published theirs; the position of dead ranks stays unknown.
    """
    if not read_texts([_key(rank)]):
        return ""
    keys = [_key(r) for r in range(world_size)]
    deadline = time.monotonic() + POSITION_TIMEOUT_SECONDS
    found = read_texts(keys)
    while len(found) < world_size and time.monotonic() < deadline:
        time.sleep(0.05)
        found = read_texts(keys)
    ranks_at: dict[str, list[int]] = defaultdict(list)
    for r, key in enumerate(keys):
        ranks_at[found.get(key, "no answer")].append(r)
    if [*ranks_at] == [OTHER_WORK]:
        return ""
    return "the ranks were at: " + ", ".join(f"{place} ({_list_ranks(ranks)})" for place, ranks in ranks_at.items())


def _list_ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - MAX_RANKS_LISTED} more" if len(ranks) > MAX_RANKS_LISTED else ""
    return f"rank{'s' * (len(ranks) > 1)} {' '.join(map(str, ranks[:MAX_RANKS_LISTED]))}{more}"


def _key(rank: int) -> str:
    return f"place of rank {rank}"
