"""Split of the fused projection into queries, keys and values, with their norms and rotary positions.

Shapes: S sequence, B batch, G key/value heads, X query heads per key/value head, N = G X, D channels of a head,
O = G (X + 2) D: of each key/value head its queries, then its key, then its value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.bias import with_bias_gradient
from megatron.kernels.compile import compiled, compiler_missing, triton_missing, triton_region
from megatron.kernels.norm import norm
from megatron.kernels.operation import Candidate, KernelCheck, Operation
from megatron.kernels.rotary import RotaryCosSin, rotate


class HeadNorms(NamedTuple):
    """Norms of every query head and of every key head, ``[D]``: RMSNorm, or with biases LayerNorm."""

    q_weight: Tensor
    q_bias: Tensor | None
    k_weight: Tensor
    k_bias: Tensor | None
    eps: float


SplitQKVKernel = Callable[
    [Tensor, Tensor | None, tuple[int, int], HeadNorms | None, RotaryCosSin | None], tuple[Tensor, Tensor, Tensor]
]
"""``split_qkv(qkv_SBO, bias_O, (G, D), norms, rotary) -> (q_SBND, k_SBGD, v_SBGD)``."""


def split_qkv(
    qkv_SBO: Tensor,
    bias_O: Tensor | None,
    heads: tuple[int, int],
    norms: HeadNorms | None,
    rotary: RotaryCosSin | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split, normalise and rotate.

    Args:
        qkv_SBO: output of the projection, which contains ``bias_O`` (see :mod:`megatron.kernels.bias`).
        bias_O: of the projection.
        heads: number of key/value heads, and channels of a head.
        norms: None for no norms.
        rotary: None for no rotary positions.
    """
    groups, channels = heads
    qkv_SBGXD = with_bias_gradient(qkv_SBO, bias_O).unflatten(2, (groups, -1, channels))
    q, k, v = qkv_SBGXD.split((qkv_SBGXD.shape[3] - 2, 1, 1), dim=3)
    q_SBND, k_SBGD, v_SBGD = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
    if norms is not None:
        q_SBND = norm(q_SBND, norms.q_weight, norms.q_bias, norms.eps)
        k_SBGD = norm(k_SBGD, norms.k_weight, norms.k_bias, norms.eps)
    if rotary is not None:
        q_SBND, k_SBGD = (rotate(x, rotary.cos, rotary.sin, rotary.interleaved) for x in (q_SBND, k_SBGD))
    return q_SBND, k_SBGD, v_SBGD


compiled_split_qkv = cache(compiled(split_qkv))


def _checks() -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)
    half = 6.0 * torch.rand(300, 1, 1, 4, generator=generator, dtype=torch.float64)
    qkv = torch.randn(300, 2, 2 * 4 * 12, generator=generator, dtype=torch.float64)
    bias, weights = qkv[0, 0], torch.randn(4, 12, generator=generator, dtype=torch.float64)

    def rotary(interleaved: bool, like: Tensor) -> RotaryCosSin:
        # Cosines and sines are constants of a model, so they are computed here and have no gradient.
        angles = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
        return RotaryCosSin(angles.cos().to(like), angles.sin().to(like), interleaved)

    def normed(f: SplitQKVKernel, t: Sequence[Tensor]) -> Sequence[Tensor]:
        return f(t[0], None, (2, 12), HeadNorms(t[1], None, t[2], None, 1e-5), rotary(False, t[0]))

    return [
        KernelCheck(lambda f, t: f(t[0], t[1], (2, 12), None, rotary(True, t[0])), (qkv, bias)),
        KernelCheck(lambda f, t: f(t[0], t[1], (2, 12), None, None), (qkv, bias)),
        KernelCheck(normed, (qkv, weights[0], weights[1])),
    ]


SPLIT_QKV = Operation(
    {
        "triton": Candidate(triton_region("split_qkv"), triton_missing),
        "compiled": Candidate(compiled_split_qkv, compiler_missing),
        "torch": Candidate(lambda: split_qkv),
    },
    _checks,
)
