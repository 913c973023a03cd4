"""Layout-independent random numbers: initial values by parameter name, and hash keys for counter-based draws."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from megatron.distributed.sharding import ShardPiece, ShardSpec

BLOCK_ROWS = 64


def initialize(local: Tensor, spec: ShardSpec, name: str, seed: int) -> None:
    """Fill a local tensor with its part of the global parameter's initial values; padding is 0.

    Every block of ``BLOCK_ROWS`` stored rows has its own generator. So a rank draws only the blocks it needs, and all
    layouts and dtypes start from the same fp32 values.

    Args:
        local: ``spec.local_shape``, filled in place.
        spec: the boxes of the global tensor that it holds.
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
            view[piece.local_box.slices] = values.view(piece.global_box.size).to(local)


def _draw(spec: ShardSpec, piece: ShardPiece, name: str, seed: int) -> Tensor:
    """Return standard normal values ``[rows, columns]`` of one piece."""
    rows, columns = spec.shape[0], spec.shape[-1] if len(spec.shape) > 1 else 1
    lead = spec.view[:-1] if len(spec.shape) > 1 else spec.view
    held = torch.arange(rows).view(lead)[piece.global_box.slices[: len(lead)]].flatten()
    out = []
    for block in (held // BLOCK_ROWS).unique().tolist():
        first = block * BLOCK_ROWS
        drawn = torch.empty(min(BLOCK_ROWS, rows - first), columns, dtype=torch.float32)
        drawn.normal_(generator=torch.Generator().manual_seed(stable_hash(seed, name, block)))
        out.append(drawn[held[held // BLOCK_ROWS == block] - first])
    values = torch.cat(out)
    return values[:, piece.global_box.slices[-1]] if len(spec.shape) > 1 else values[:, 0]


def stable_hash(*parts: object) -> int:
    """Return a 63-bit hash of the printed ``parts``."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
