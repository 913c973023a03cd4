"""Counter-based dropout, and the stateless random bits behind it.

The mask is a hash of global coordinates, equal in every layout and implementation, and under recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.kernels.compile import compiled, compiler_missing
from megatron.kernels.operation import Candidate, KernelCheck, Operation

MASK = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """Hash 32-bit integers, stored in int64, bijectively; every input bit affects all output bits."""
    x = x & MASK
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & MASK
    return (x >> 16) ^ x


def random_bits(key: int, step: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return 32 random bits per row and column, a pure function of key, step, row and column.

    Args:
        key: 63 bits, a hash of the purpose.
        step: int64 scalar on the device of the others.
        rows: int64 ``[R]``.
        columns: int64 ``[C]``.

    Returns:
        int32 ``[R, C]``.
    """
    low = mix(step ^ (key & MASK))
    high = mix(low ^ (key >> 32))
    heads = mix(mix((rows & MASK) ^ low) ^ (rows >> 32) ^ high)
    return _mix_in_place(heads.to(torch.int32).unsqueeze(1) ^ columns.to(torch.int32))


def _mix_in_place(x: Tensor) -> Tensor:
    """Compute :func:`mix` of int32 values, whose products wrap around; takes a quarter of its time."""
    for _ in range(2):
        x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x45D9F3B)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


DropoutKernel = Callable[[Tensor, float, Tensor, Tensor, Tensor], Tensor]
"""``dropout(x_SBH, probability, key, samples_B, positions_S) -> y_SBH``."""


def dropout(x_SBH: Tensor, probability: float, key: Tensor, samples_B: Tensor, positions_S: Tensor) -> Tensor:
    """Drop elements of the residual stream; the others are scaled by ``1 / (1 - probability)``.

    Args:
        x_SBH: rows of the sequence.
        probability: of dropping an element.
        key: 0-d int64, a hash of the step and the place in the model. A tensor, so that a new step does not recompile.
        samples_B: int64 sample ids.
        positions_S: int64 positions of the rows in the sequence.
    """
    positions, channels = positions_S.view(-1, 1, 1), torch.arange(x_SBH.shape[2], device=x_SBH.device)
    keep = keep_mask(probability, key, samples_B.view(1, -1, 1), positions, channels)
    return x_SBH * keep * (1.0 / (1.0 - probability))


def keep_mask(probability: float, key: int | Tensor, samples: Tensor, positions: Tensor, channels: Tensor) -> Tensor:
    """Return which elements survive dropout, as a boolean tensor of the broadcast shape.

    A pure function of global coordinates: equal under recomputation and in every layout.

    Args:
        probability: of dropping an element.
        key: 63 bits, a hash of (seed, step, layer, site).
        samples: int64 sample ids, broadcastable with the other two.
        positions: int64 positions in the sequence.
        channels: int64 channels.
    """
    return _hash(key, samples, positions, channels) >= int(probability * (MASK + 1))


def uniform_noise(key: int | Tensor, samples: Tensor, positions: Tensor, channels: Tensor) -> Tensor:
    """Return fp32 numbers drawn uniformly from -1 to 1; arguments and shape as for :func:`keep_mask`."""
    return (_hash(key, samples, positions, channels) >> 8) / float(1 << 23) - 1.0


def _hash(key: int | Tensor, samples: Tensor, positions: Tensor, channels: Tensor) -> Tensor:
    """Return 32 random bits, stored in int64."""
    rows = mix(mix(samples ^ (key & MASK)) ^ positions ^ (key >> 32))
    return mix(rows ^ mix(channels + 1))


def _checks() -> Sequence[KernelCheck]:
    x = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    key, samples = torch.tensor(0x1234_5678_9ABC_DEF0), torch.tensor([7, 3_000_000_000])
    positions = torch.arange(4, 10)
    return [KernelCheck(lambda f, t: (f(t[0], 0.3, *t[1:]),), (x, key, samples, positions))]


DROPOUT = Operation(
    {"compiled": Candidate(compiled(dropout), compiler_missing), "torch": Candidate(lambda: dropout)}, _checks
)
