"""Run ``pretrain_gpt.py`` on one rank of the null GPU, and record it. A job of ``tests/kit/pool.py``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.inference import generate
from megatron.training import loop
from megatron.training.cuda_graphs import StepRunner
from megatron.training.trainer import Trainer
from tests.nullgpu import faults
from tests.nullgpu.trace import mark, record


def rehearse(
    rank: int, world_size: int, folder: str, port: int, program: str, argv: Sequence[str], fault: str | None = None
) -> None:
    """Run ``main`` of a program.

    Args:
        rank: of this process.
        world_size: number of ranks.
        folder: for ``rank0.trace`` and ``rank0.log`` and so on; argv may contain {folder}.
        port: of the store of this job.
        program: module with a function ``main``.
        argv: its flags.
        fault: name of a function in ``faults``.

    Raises:
        RuntimeError: with the end of its output, if it fails.
    """
    if dist.is_initialized():  # the pool's own group
        dist.barrier()  # one that left at once could break connections that a peer is still making
        dist.destroy_process_group()
    torch.backends.cuda.enable_cudnn_sdp(False)  # its kernels are built by the driver
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    environ = {name: str(value) for name, value in place.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with ExitStack() as stack:
        log = stack.enter_context(Path(folder, f"rank{rank}.log").open("w"))
        for context in (
            patch.dict(os.environ, environ),
            redirect_stdout(log),
            redirect_stderr(log),
            null_values(),
            marks(),
            *([getattr(faults, fault)()] if fault else []),
        ):
            stack.enter_context(context)
        with record() as trace:
            main = import_module(program).main
            status = main([word.replace("{folder}", folder) for word in argv])
    trace.dump(Path(folder, f"rank{rank}.trace"))
    if status:
        raise RuntimeError(Path(folder, f"rank{rank}.log").read_text()[-3000:])


@contextmanager
def null_values() -> Iterator[None]:
    """Replace what depends on numbers: the null GPU computes none."""
    with ExitStack() as stack:
        stack.enter_context(patch("megatron.kernels.registry.check_kernel", lambda *arguments, **options: None))
        stack.enter_context(patch.object(generate, "sample_tokens", as_if_finite(generate.sample_tokens)))
        twins: dict[tuple[int, ...], Any] = {}
        for name in ("all_gather_objects", "gather_objects", "broadcast_object"):
            stack.enter_context(patch.object(comm, name, through_gloo(getattr(comm, name), twins)))
        yield


def through_gloo(exchange: Callable[[Any, Group], Any], twins: dict[tuple[int, ...], Any]) -> Callable[..., Any]:
    """Return a function that exchanges objects over a group of the same ranks with the gloo backend."""

    def call(value: Any, group: Group) -> Any:
        if group.has_peers and group.ranks not in twins:
            twins[group.ranks] = dist.new_group(list(group.ranks), backend="gloo", use_local_synchronization=True)
        return exchange(value, replace(group, handle=twins.get(group.ranks)))

    return call


def as_if_finite(sample: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that samples tokens and finds every tensor true, also in the check of logits."""

    def call(*arguments: Any) -> torch.Tensor:
        with patch.object(torch.Tensor, "__bool__", lambda tensor: True):
            return sample(*arguments)

    return call


@contextmanager
def marks() -> Iterator[None]:
    """Mark where steps and the reading of batches begin and end."""
    next_batches = Trainer.next_batches

    def marked(run: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any) -> Any:
            mark("pause end")
            mark("step begin")
            metrics = run(*arguments)
            mark("step end")
            mark("pause begin")
            return metrics

        return step

    def read(trainer: Trainer) -> Any:
        mark("batch begin")
        batches = next_batches(trainer)
        mark("batch end")
        return batches

    with ExitStack() as stack:
        stack.enter_context(patch.object(StepRunner, "__call__", marked(StepRunner.__call__)))
        stack.enter_context(patch.object(loop, "train_step", marked(loop.train_step)))
        stack.enter_context(patch.object(Trainer, "next_batches", read))
        yield
