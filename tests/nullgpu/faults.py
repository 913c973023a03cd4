"""Faults that a rehearsal must detect: each function returns a context in which the library has the fault."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.distributed import comm
from megatron.layers.mlp import MLP
from megatron.training import cuda_graphs
from megatron.training.trainer import Trainer

Patch = AbstractContextManager[Any]


def in_layer(act: Callable[[Tensor], Tensor]) -> Patch:
    """Every MLP first applies ``act`` to its input."""
    forward = MLP.forward
    return patch.object(MLP, "forward", lambda mlp, x, *rest: forward(mlp, act(x), *rest))


def in_step(act: Callable[[Trainer], None]) -> Patch:
    """Every step begins with ``act``."""
    step = cuda_graphs.train_step

    def faulty(trainer: Trainer, *rest: Any) -> Any:
        act(trainer)
        return step(trainer, *rest)

    return patch.object(cuda_graphs, "train_step", faulty)


def item() -> Patch:
    return in_layer(lambda x: x * (1.0 + x.sum().item()))


def pageable_copy() -> Patch:
    return in_layer(lambda x: x * torch.ones(x.shape[-1], dtype=x.dtype).to(x.device, non_blocking=True))


def tensor_on_cpu() -> Patch:
    return in_layer(lambda x: x * torch.ones(x.shape[-1], dtype=x.dtype))


def kernel_on_side_stream() -> Patch:
    def act(x: Tensor) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            return x * 2.0

    return in_layer(act)


def collective_on_side_stream() -> Patch:
    reduce = comm.all_reduce

    def faulty(x: Tensor, *rest: Any, **options: Any) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            return reduce(x, *rest, **options)

    return patch.object(comm, "all_reduce", faulty)


def crossed_communicators() -> Patch:
    def act(trainer: Trainer) -> None:
        groups = [trainer.mesh.dp_cp, trainer.mesh.weight_gather_group("dp", "cp")]
        flags = [torch.zeros(1, device=trainer.device) for _ in groups]
        order = groups if trainer.mesh.rank == 0 else groups[::-1]
        for pending in [comm.start_all_reduce(flag, group) for flag, group in zip(flags, order)]:
            pending.wait()

    return in_step(act)


def missing_collective() -> Patch:
    def act(trainer: Trainer) -> None:
        if trainer.mesh.rank == 0:
            comm.all_reduce(torch.zeros(1, device=trainer.device), trainer.mesh.dp_cp)

    return in_step(act)


def late_compilation() -> Patch:
    def act(trainer: Trainer) -> None:
        if trainer.iteration == 6:
            torch.compile(lambda x: x.sin() * 3.0 + 1.0)(torch.zeros(64, device=trainer.device))

    return in_step(act)
