"""From the pieces of all ranks to the global tensor: for tests, verification and small exports."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from megatron.parallel import comm
from megatron.parallel.comm import Group
from megatron.parallel.shard import Box, ShardSpec


def assemble(spec: ShardSpec, local: Tensor, tp: Group) -> Tensor:
    """The global tensor ``spec.shape`` on every tensor-parallel rank; padding left out.

    Args:
        spec: this rank's pieces.
        local: its tensor, ``spec.local_shape``.
        tp: the ranks that hold the other pieces.

    """
    view = local.detach().cpu().view(spec.local_view)
    mine: list[tuple[Box, Tensor]] = [(p.place, view[p.local.slices].clone()) for p in spec.owned]
    out = torch.full(spec.view, float("nan"), dtype=local.dtype)
    for pieces in comm.all_gather_objects(mine, tp):
        for place, values in cast(list[tuple[Box, Tensor]], pieces):
            out[place.slices] = values
    return out.view(spec.shape)
