"""Application of rotary position embeddings to queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.kernels.compile import compiled, compiler_missing
from megatron.kernels.operation import Candidate, KernelCheck, Operation

RotaryKernel = Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
"""``rotary(q_SBND, k_SBGD, cos, sin, interleaved) -> (q, k)``, rotated."""


def rotate(x_SBND: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first channels of every head.

    Args:
        x_SBND: ``[sequence, batch, heads, channels]``.
        cos: of the angles, ``[S, B or 1, 1, channels to rotate]``.
        sin: likewise.
        interleaved: rotate channel pairs (0,1),(2,3).. instead of (i, i + width/2).

    """
    width = cos.shape[-1]
    x = x_SBND[..., :width]
    if interleaved:
        rotated_90 = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    else:
        rotated_90 = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), dim=-1)
    rotated = x * cos + rotated_90 * sin
    return rotated if width == x_SBND.shape[-1] else torch.cat((rotated, x_SBND[..., width:]), dim=-1)


def rotary(q_SBND: Tensor, k_SBGD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys; see :func:`rotate`."""
    return rotate(q_SBND, cos, sin, interleaved), rotate(k_SBGD, cos, sin, interleaved)


def _trials() -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)
    angles = 6.0 * torch.rand(5, 1, 1, 8, generator=generator, dtype=torch.float64)
    q = torch.randn(5, 2, 4, 12, generator=generator, dtype=torch.float64)

    def trial(interleaved: bool) -> KernelCheck:
        # Cosines and sines are constants of a model, so they are computed here and have no gradient.
        return KernelCheck(
            lambda f, t: f(t[0], t[1], angles.cos().to(t[0]), angles.sin().to(t[0]), interleaved), (q, q[:, :, :2])
        )

    return [trial(False), trial(True)]


ROTARY = Operation(
    {"compiled": Candidate(compiled(rotary), compiler_missing), "torch": Candidate(lambda: rotary)}, _trials
)
