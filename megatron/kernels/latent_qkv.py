"""Queries, keys and values of latent attention from their projections (DeepSeek-V2, arXiv 2405.04434).

Shapes: S queries, T keys, B batch, N heads, P rotated channels of a key, C its other channels, D = C + P, V channels of
a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.compile import compiled, compiler_missing, triton_missing, triton_region
from megatron.kernels.operation import Candidate, KernelCheck, Operation
from megatron.kernels.qkv import RotaryCosSin, rotate

LatentQKVKernel = Callable[
    [Tensor, Tensor, Tensor, int, RotaryCosSin | None, RotaryCosSin | None], tuple[Tensor, Tensor, Tensor]
]
"""``latent_qkv(q_SBO, kv_TBO, k_TBP, C, q_rotary, k_rotary) -> (q_SBND, k_TBND, v_TBNV)``."""


def latent_qkv(
    q_SBO: Tensor,
    kv_TBO: Tensor,
    k_TBP: Tensor,
    channels: int,
    q_rotary: RotaryCosSin | None,
    k_rotary: RotaryCosSin | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate the last channels of the queries, and append the rotated ones, which all heads share, to the keys.

    Args:
        q_SBO: projected queries, ``N (C + P)``.
        kv_TBO: projected keys and values, ``N (C + V)``: of each head its key, then its value.
        k_TBP: channels of the keys to rotate.
        channels: C, those of a query and of a key that are not rotated.
        q_rotary: positions of the queries; None for no rotation.
        k_rotary: positions of the keys, likewise.
    """
    rotated = k_TBP.shape[2]
    q_SBND = q_SBO.unflatten(2, (-1, channels + rotated))
    if q_rotary is not None:
        plain, turned = q_SBND.split((channels, rotated), dim=3)
        q_SBND = torch.cat((plain, rotate(turned, q_rotary.cos, q_rotary.sin, q_rotary.interleaved)), dim=3)
    k_TB1P = k_TBP.unsqueeze(2)
    if k_rotary is not None:
        k_TB1P = rotate(k_TB1P, k_rotary.cos, k_rotary.sin, k_rotary.interleaved)
    plain, v_TBNV = kv_TBO.unflatten(2, (q_SBND.shape[2], -1)).tensor_split((channels,), dim=3)
    k_TBND = torch.cat((plain, k_TB1P.expand(*plain.shape[:3], -1)), dim=3)
    return q_SBND, k_TBND, v_TBNV.contiguous()  # a copy, so that the projection is not kept for it


def _checks() -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)
    angles = 6.0 * torch.rand(300, 1, 1, 4, generator=generator, dtype=torch.float64).repeat_interleave(2, -1)
    q, kv, k = (torch.randn(300, 2, n, generator=generator, dtype=torch.float64) for n in (3 * 20, 3 * 28, 8))

    def rotary(like: Tensor) -> RotaryCosSin:
        return RotaryCosSin(angles.cos().to(like), angles.sin().to(like), True)

    def turned(f: LatentQKVKernel, t: Sequence[Tensor]) -> Sequence[Tensor]:
        angles = rotary(t[0])
        return f(t[0], t[1], t[2], 12, angles, angles)

    return [
        KernelCheck(turned, (q, kv, k)),
        KernelCheck(lambda f, t: f(t[0], t[1], t[2], 12, None, None), (q, kv, k)),
    ]


def _same_positions(q_SBO: Tensor, kv_TBO: Tensor, *rest: Any) -> bool:
    *_, q_rotary, k_rotary = rest
    return len(q_SBO) == len(kv_TBO) and q_rotary is k_rotary


LATENT_QKV = Operation(
    {
        "triton": Candidate(triton_region("latent_qkv", "triton_latent_qkv"), triton_missing, covers=_same_positions),
        "compiled": Candidate(cache(compiled(latent_qkv)), compiler_missing),
        "torch": Candidate(lambda: latent_qkv),
    },
    _checks,
)
