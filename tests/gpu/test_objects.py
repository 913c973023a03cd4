"""Values that ranks exchange go through NCCL, which takes tensors on GPUs only."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.distributed import comm
from megatron.distributed.comm import Group


@pytest.mark.gpu
def test_values_pass_through_nccl(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a group of one rank, which is made to communicate all the same."""
    monkeypatch.setattr(Group, "has_peers", True)
    monkeypatch.setattr(Group, "uses_nccl", True)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=gpu)
    try:
        group = Group((0,), 0, dist.group.WORLD)
        for value in ({"a": [1, None, "é"]}, "x" * 100_000):
            assert comm.all_gather_objects(value, group) == comm.gather_objects(value, group) == [value]
            assert comm.broadcast_object(value, group) == value
    finally:
        dist.destroy_process_group()
