"""Random bits as pure functions of numbers: no generator, and so no state, on any device."""

from __future__ import annotations

from torch import Tensor

MASK = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers (held in int64) that spreads every input bit over all output bits."""
    x = x & MASK
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & MASK
    return (x >> 16) ^ x


def random_bits(key: int, step: Tensor, counters: Tensor) -> Tensor:
    """32 random bits for each counter: a pure function of key, step and counter.

    Args:
        key: 63 bits, a hash of whatever the draw is for.
        step: int64 scalar on the counters' device.
        counters: int64, any.

    Returns:
        int64 of the counters' shape, below 2^32.

    """
    low = mix(step ^ (key & MASK))
    high = mix(low ^ (key >> 32))
    return mix(mix((counters & MASK) ^ low) ^ (counters >> 32) ^ high)
