"""Append the first failure of a start to ``failures.jsonl``, for scripts that look for bad machines."""

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
"""Seconds after which a hanging write is abandoned."""

NONFINITE, MEMORY, DEVICE, CONTACT = "nonfinite", "out-of-memory", "device", "lost-contact"
DATA, DISK, OTHER = "data", "disk", "other"
KINDS = (NONFINITE, MEMORY, DEVICE, CONTACT, DATA, DISK, OTHER)

CODES = {"E207": DEVICE, "E701": DISK, "E816": DISK}
"""Errors at the start caused by the machine, not by flags: missing GPU, unwritable folder, full disk."""

OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)
OF_THE_PROGRAM = re.compile(r"device-side assert|invalid (configuration )?argument|no kernel image", re.IGNORECASE)
"""CUDA errors caused by the program, not by the device."""

OF_THE_DEVICE = re.compile(
    r"CUDA (driver )?error|Cuda failure|unhandled cuda error|CU(BLAS|DNN)_STATUS|\bECC\b|\bXid\b"
)
OF_THE_ADAPTER = re.compile(r"ncclSystemError|unhandled system error")
"""NCCL's failed system calls: the fault of this machine's network adapter unless the text matches ``PEER_PATTERN``."""

A_PEER = re.compile(r"remote|peer|connect|socket|timed? ?out|timeout", re.IGNORECASE)


def kind_of(error: BaseException) -> str:
    """Classify an error as one of ``KINDS``; ``device`` suggests that the machine is faulty."""
    cause = error.__cause__ if isinstance(error.__cause__, UserError | DataError) else error
    if isinstance(cause, UserError):
        return next((CODES[problem.code] for problem in cause.problems if problem.code in CODES), OTHER)
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
    """Return this machine's name: Slurm's node name if there is one."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def whose(launch: Launch, environ: Mapping[str, str]) -> str:
    """Return ``rank R``, or ``rank R on HOST`` in a run on several machines."""
    if launch.launcher == "srun":
        multi_node = environ.get("SLURM_NNODES", "1") != "1"
    else:
        multi_node = launch.world_size > int(environ.get("LOCAL_WORLD_SIZE", launch.world_size))
    return f"rank {launch.rank} on {host(environ)}" if multi_node else f"rank {launch.rank}"


def note_failure(run_dir: str | None, error: BaseException, environ: Mapping[str, str]) -> None:
    """Append a line on the error of this rank, the first to fail, to ``run_dir/failures.jsonl``.

    Never raises and never blocks for long. Writes nothing if the folder does not exist or a later start owns it.
    """
    launch = Launch.read(environ)
    if run_dir is None or isinstance(error, SupersededError) or not Path(run_dir).is_dir():
        return
    if not has_joined() and not _is_reporter(launch, kind_of(error)):
        return
    line = {
        "time": time.time(),
        "rank": launch.rank,
        "host": host(environ),
        "local_rank": launch.local_rank,
        "kind": kind_of(error),
        "sentence": " ".join(sentence(error).split()),
    }
    writer = threading.Thread(target=_append, args=(Path(run_dir) / NAME, line), daemon=True)
    writer.start()
    writer.join(PATIENCE)


def _is_reporter(launch: Launch, kind: str) -> bool:
    """Return True if this rank reports a failure that happens before torch.distributed is initialised.

    All ranks see the same flag errors, so rank 0 reports those. Missing devices are reported by one rank of the
    machine under torchrun; under srun only the ranks without a device fail, and each reports itself.
    """
    return launch.rank == 0 or (kind == DEVICE and (launch.local_rank == 0 or launch.launcher == "srun"))


def _append(path: Path, line: Mapping[str, object]) -> None:
    with suppress(Exception):
        file = JsonLines(path, warn=lambda text: None)
        file.write(line)
        file.close()
