"""Run the ranks of a run as processes of this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any, TypeVar

from megatron.config.plugins import load_plugins
from megatron.config.run import RunConfig

T = TypeVar("T")


def run_ranks(
    work: Callable[..., T], config: RunConfig, world_size: int, *arguments: Any, preload: Sequence[str] = ()
) -> list[T]:
    """Call ``work(config, rank, world_size, *arguments)`` on each rank, and return the results in rank order.

    Args:
        work: a function at the top level of a module.
        config: of the run.
        world_size: number of ranks, each a process.
        arguments: further ones, which can be pickled.
        preload: modules that the processes import once.

    Raises:
        Exception: that of the first rank that failed.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([*preload])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ProcessPoolExecutor(world_size, mp_context=context) as executor:
        jobs = [
            executor.submit(_join_and, work, config, rank, world_size, port, arguments) for rank in range(world_size)
        ]
        done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
        for job in done:
            job.result()  # raises the first rank's error; those of the others follow from it
        return [job.result() for job in jobs]


def _join_and(
    work: Callable[..., T], config: RunConfig, rank: int, world_size: int, port: int, arguments: Sequence[Any]
) -> T:
    """Run one rank; closes its connections if it fails, so that the other ranks fail too."""
    from megatron.distributed.launch import destroy_distributed
    from megatron.training.build_model import join_distributed

    load_plugins(config.compute.plugin)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        return work(config, *join_distributed(config), *arguments)
    finally:
        destroy_distributed()
