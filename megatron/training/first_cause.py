"""What a start failed of first, and where, in a line of ``failures.jsonl`` for scripts that look for bad machines."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from megatron.checkpoint.errors import CheckpointError, SupersededError
from megatron.config.launch import Launch
from megatron.config.problems import UserError
from megatron.data.errors import DataError
from megatron.parallel.mesh import has_joined, is_lost_contact
from megatron.training.failure import sentence
from megatron.training.json_lines import JsonLines
from megatron.training.nonfinite import NonFiniteError

NAME = "failures.jsonl"

PATIENCE = 5.0
"""Seconds that a disk may take to write the line: one that hangs must not keep the process."""

NONFINITE, MEMORY, DEVICE, CONTACT = "nonfinite", "out-of-memory", "device", "lost-contact"
DATA, DISK, OTHER = "data", "disk", "other"
KINDS = (NONFINITE, MEMORY, DEVICE, CONTACT, DATA, DISK, OTHER)

CODES = {"E207": DEVICE, "E701": DISK, "E816": DISK}
"""Refusals at the start that are not of the flags: a GPU that is gone, a folder that cannot be written, no room."""

OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)
OF_THE_PROGRAM = re.compile(r"device-side assert|invalid (configuration )?argument|no kernel image", re.IGNORECASE)
"""Errors of CUDA that say nothing against the device."""

OF_THE_DEVICE = re.compile(
    r"CUDA (driver )?error|Cuda failure|unhandled cuda error|CU(BLAS|DNN)_STATUS|\bECC\b|\bXid\b"
)
OF_THE_ADAPTER = re.compile(r"ncclSystemError|unhandled system error")
"""NCCL, of a call to the system that failed: of its own network adapter, unless the words are of `A_PEER`."""

A_PEER = re.compile(r"remote|peer|connect|socket|timed? ?out|timeout", re.IGNORECASE)


def kind_of(error: BaseException) -> str:
    """What sort of failure an error tells of; ``device`` is what speaks against the machine it came from."""
    cause = error.__cause__ if isinstance(error.__cause__, UserError | DataError) else error
    if isinstance(cause, UserError):
        return next((CODES[problem.code] for problem in cause.problems if problem.code in CODES), OTHER)
    of_class = {
        NonFiniteError: NONFINITE,
        DataError: DATA,
        CheckpointError: DISK,
        MemoryError: MEMORY,
        torch.OutOfMemoryError: MEMORY,
        ConnectionError: CONTACT,
        TimeoutError: CONTACT,
        OSError: DISK,
    }
    return next((kind for known, kind in of_class.items() if isinstance(cause, known)), None) or _by_words(cause)


def _by_words(error: BaseException) -> str:
    """As :func:`kind_of`, of what libraries tell in words alone."""
    text = str(error)
    if OUT_OF_MEMORY.search(text):
        return MEMORY
    if OF_THE_PROGRAM.search(text):
        return OTHER
    if isinstance(error, torch.AcceleratorError) or OF_THE_DEVICE.search(text):
        return DEVICE
    if OF_THE_ADAPTER.search(text) and not A_PEER.search(text):
        return DEVICE
    return CONTACT if is_lost_contact(error) else OTHER


def host(environ: Mapping[str, str]) -> str:
    """This machine's name, as Slurm calls it where it is one of its nodes."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def whose(launch: Launch, environ: Mapping[str, str]) -> str:
    """The rank in words, with its machine where there are several."""
    if launch.launcher == "srun":
        several = environ.get("SLURM_NNODES", "1") != "1"
    else:
        several = launch.world_size > int(environ.get("LOCAL_WORLD_SIZE", launch.world_size))
    return f"rank {launch.rank} on {host(environ)}" if several else f"rank {launch.rank}"


def note_failure(run_dir: str | None, error: BaseException, environ: Mapping[str, str]) -> None:
    """Append a line on what this rank, the first of all that failed, failed of; never raises, never hangs.

    Where there is no such folder there is no line. A start that was superseded leaves it to the later one.
    """
    launch = Launch.read(environ)
    if run_dir is None or isinstance(error, SupersededError) or not Path(run_dir).is_dir():
        return
    if not has_joined() and not _speaks_for_others(launch, kind_of(error)):
        return
    line = {
        "time": time.time(),
        "rank": launch.rank,
        "host": host(environ),
        "local_rank": launch.local_rank,
        "kind": kind_of(error),
        "sentence": " ".join(sentence(error).split()),
    }
    writing = threading.Thread(target=_append, args=(Path(run_dir) / NAME, line), daemon=True)
    writing.start()
    writing.join(PATIENCE)


def _speaks_for_others(launch: Launch, kind: str) -> bool:
    """Whether this rank tells of a failure before the ranks have met, when nobody knows who was the first.

    What the flags are guilty of all ranks know; of a machine's devices one of its ranks does. torchrun tells all ranks
    how many there are, under srun those alone miss a device that have none.
    """
    return launch.rank == 0 or (kind == DEVICE and (launch.local_rank == 0 or launch.launcher == "srun"))


def _append(path: Path, line: Mapping[str, object]) -> None:
    with suppress(Exception):
        file = JsonLines(path, warn=lambda text: None)
        file.write(line)
        file.close()
