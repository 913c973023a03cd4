"""Exchange tensors between the same ranks of several replicas, in host memory and in short transfers."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.config.option import Role
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.distributed import comm
from megatron.distributed.comm import Group

CHUNK_BYTES = 1 << 26
"""Bytes exchanged at a time: a long transfer consists of short ones, each of which may time out."""


def ordered_sum(x: Tensor, group: Group) -> Tensor:
    """Return the sum of a flat tensor over the group, added in the order of its ranks.

    An element's bits do not depend on its place, because the ranks that share a parameter have it at other places.
    """
    padded = torch.nn.functional.pad(x, (0, -len(x) % group.size))
    parts = comm.start_all_to_all(padded, group).wait().view(group.size, -1)
    mine = parts[0].clone()
    for part in parts[1:]:
        mine += part
    return comm.all_gather(mine, group)[: len(x)]


def copy_to_peers(tensors: Iterable[Tensor], group: Group, source: int, targets: Collection[int]) -> None:
    """Copy tensors of one rank of the group to those of others, in place; collective over the group.

    All ranks wait after each chunk: a wait for the whole state could exceed the timeout.

    Args:
        tensors: in the same order on all ranks.
        group: of the ranks.
        source: rank in the group that sends.
        targets: ranks in the group that receive.
    """
    for bunch in _bunches(tensors):
        host = torch.cat([tensor.detach().cpu().reshape(-1) for tensor in bunch])
        for chunk in host.split(CHUNK_BYTES // host.itemsize):
            sent = [(chunk, rank) for rank in targets] if group.rank == source else []
            received = [(chunk, source)] if group.rank in targets else []
            comm.start_exchange(sent, received, chunk, group).wait()
            comm.all_reduce(torch.zeros(1), group)
        if group.rank in targets:
            with torch.no_grad():
                for tensor, value in zip(bunch, host.split([tensor.numel() for tensor in bunch])):
                    tensor.copy_(value.view(tensor.shape))


def _bunches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield together what has one type and ``CHUNK_BYTES`` at most: a transfer waits for all ranks twice."""
    bunch, size = list[Tensor](), 0
    for tensor in tensors:
        if bunch and (tensor.dtype != bunch[0].dtype or size + tensor.nbytes > CHUNK_BYTES):
            yield bunch
            bunch, size = [], 0
        bunch.append(tensor)
        size += tensor.nbytes
    if bunch:
        yield bunch


def hash_of(tensors: Mapping[str, Tensor]) -> int:
    """Return a hash of names and bits."""
    digest = hashlib.blake2b(digest_size=6)
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def shared_options(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Return the options that must be the same in all replicas, as JSON: the model, its layout, and its training."""
    own = {"device", "distributed_backend", "distributed_timeout_minutes", "data_path", "train_data_path"}
    own |= {"valid_data_path", "test_data_path", "data_args_path", "per_split_data_args_path"}
    found: dict[str, Any] = {"ranks": world_size}
    for name, setting in SETTINGS.items():
        same = setting.option.role not in (Role.START, Role.FREE) or setting.group == "parallel"
        if same and name not in own:
            value = setting.value_in(config)
            found[name] = list(value) if isinstance(value, tuple) else value
    return found | {"params_dtype": config.precision.params_dtype}
