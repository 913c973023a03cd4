"""Run a function on several gloo ranks of this machine, one thread each, and collect what the ranks return."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of ``function(rank, world_size, *args)``, one per rank.

    Each call starts new processes, so no memory is left over from an earlier one. ``function`` must be importable,
    and its result picklable.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of the first rank that fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run_rank, (world_size, folder, function, args), nprocs=world_size)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world_size)]


def _run_rank(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", next(n for _, n in socket.if_nameindex() if n in ("lo", "lo0")))
        dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=world_size)
    result = function(rank, world_size, *args)
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))
    if world_size > 1:
        dist.destroy_process_group()
