"""Layout-independent random numbers: initial values by parameter name, and hash keys for counter-based draws."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron.distributed.sharding import ShardPiece, ShardSpec

BLOCK_ROWS = 64


def inverse_softplus_of_exp(x: Tensor) -> Tensor:
    """Return y with ``softplus(y) = exp(x)``, of at least 1e-4: a bias for step sizes that are uniform in logarithm."""
    steps = x.exp().clamp(min=1e-4)
    return steps + (-torch.expm1(-steps)).log()


TRANSFORMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "log": torch.log,
    "inverse_softplus_of_exp": inverse_softplus_of_exp,
}
"""Functions of drawn initial values by name."""


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
        if spec.init.std is None and spec.init.uniform is None:
            local.fill_(spec.init.value)
            return
        view = local.zero_().view(spec.local_view)
        for piece in spec.pieces:
            values = _draw(spec, piece, name, seed)
            if spec.init.transform is not None:
                values = TRANSFORMS[spec.init.transform](values)
            view[piece.local_box.slices] = values.view(piece.global_box.size).to(local)


def _draw(spec: ShardSpec, piece: ShardPiece, name: str, seed: int) -> Tensor:
    """Return the values ``[rows, columns]`` of one piece, before their transform."""
    init = spec.init
    rows, columns = spec.shape[0], spec.shape[-1] if len(spec.shape) > 1 else 1
    lead = spec.view[:-1] if len(spec.shape) > 1 else spec.view
    held = torch.arange(rows).view(lead)[piece.global_box.slices[: len(lead)]].flatten()
    out = []
    for block in (held // BLOCK_ROWS).unique().tolist():
        first = block * BLOCK_ROWS
        drawn = torch.empty(min(BLOCK_ROWS, rows - first), columns, dtype=torch.float32)
        generator = torch.Generator().manual_seed(stable_hash(seed, name, block))
        if init.uniform is not None:
            drawn.uniform_(*init.uniform, generator=generator)
        else:
            drawn.normal_(generator=generator).mul_(init.std or 0.0)
        out.append(drawn[held[held // BLOCK_ROWS == block] - first])
    values = torch.cat(out)
    return values[:, piece.global_box.slices[-1]] if len(spec.shape) > 1 else values[:, 0]


def stable_hash(*parts: object) -> int:
    """Return a 63-bit hash of the printed ``parts``."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
