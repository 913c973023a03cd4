"""Random numbers that know no layout: initial values by name and block; keys for whatever else is drawn."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from megatron.parallel.shard import Piece, ShardSpec

BLOCK_ROWS = 64


def initialize(local: Tensor, spec: ShardSpec, name: str, seed: int) -> None:
    """Fill a local tensor with its part of the global parameter's initial values; padding becomes 0.

    Blocks of ``BLOCK_ROWS`` stored rows have a generator of their own, so a rank draws only what it touches and
    every layout and dtype starts from the same fp32 numbers.

    Args:
        local: ``spec.local_shape``, filled in place.
        spec: which boxes of the global tensor it holds.
        name: global name of the parameter.
        seed: of the run.

    """
    with torch.no_grad():
        if spec.init.std is None:
            local.fill_(spec.init.value)
            return
        view = local.zero_().view(spec.local_view)
        for piece in spec.pieces:
            values = _draw(spec, piece, name, seed).mul_(spec.init.std)
            view[piece.local.slices] = values.view(piece.place.size).to(local)


def _draw(spec: ShardSpec, piece: Piece, name: str, seed: int) -> Tensor:
    """Standard normal values ``[rows, columns]`` of one piece."""
    rows, columns = spec.shape[0], spec.shape[-1] if len(spec.shape) > 1 else 1
    lead = spec.view[:-1] if len(spec.shape) > 1 else spec.view
    held = torch.arange(rows).view(lead)[piece.place.slices[: len(lead)]].flatten()
    out = []
    for block in (held // BLOCK_ROWS).unique().tolist():
        first = block * BLOCK_ROWS
        drawn = torch.empty(min(BLOCK_ROWS, rows - first), columns, dtype=torch.float32)
        drawn.normal_(generator=torch.Generator().manual_seed(hash_of(seed, name, block)))
        out.append(drawn[held[held // BLOCK_ROWS == block] - first])
    values = torch.cat(out)
    return values[:, piece.place.slices[-1]] if len(spec.shape) > 1 else values[:, 0]


def hash_of(*parts: object) -> int:
    """A 63-bit integer from anything that prints."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
