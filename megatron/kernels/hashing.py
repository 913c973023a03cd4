"""Stateless random bits: hashes of integers, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

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
