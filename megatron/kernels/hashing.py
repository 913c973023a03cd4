"""Random bits as pure functions of numbers: no generator, and so no state, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers (held in int64) that spreads every input bit over all output bits."""
    x = x & MASK
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & MASK
    return (x >> 16) ^ x


def random_bits(key: int, step: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """32 random bits for each row and column: a pure function of key, step, row and column.

    Args:
        key: 63 bits, a hash of whatever the draw is for.
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
    """:func:`mix` of int32 values, whose products wrap around: a quarter of its time."""
    for _ in range(2):
        x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x45D9F3B)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
