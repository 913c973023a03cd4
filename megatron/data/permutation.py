"""Pseudo-random permutations that need no tables: element by element, of any size, by a key.

A number below ``a * b`` is a pair of digits, one below ``a`` and one below ``b``. Each round adds a hash of one digit
to the other one, which is invertible (a generalised Feistel network: Black and Rogaway, "Ciphers with arbitrary finite
domains", CT-RSA 2002). ``a * b`` is at least the size, and little more. A result beyond the size is permuted again
until it is below (cycle walking), which keeps the map a bijection.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROUNDS = 8
ROUND_KEYS = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(
    0x9E3779B97F4A7C15
)  # multiples of 2**64 / golden ratio
MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # as in `splitmix64`
HALF = np.uint64(32)
ELEMENTS_AT_ONCE = 1 << 14  # so that intermediate arrays stay in the CPU cache


def permute(numbers: ArrayLike, sizes: ArrayLike, keys: ArrayLike) -> NDArray[np.int64]:
    """Return the images of ``numbers [n]`` under the permutations of ``range(sizes)`` that the ``keys`` select.

    Args:
        numbers: int64, each below its size.
        sizes: int64, one or ``[n]``, from 1 to 2**62.
        keys: uint64, one or ``[n]``.
    """
    x, size, key = (np.asarray(array).astype(np.uint64) for array in (numbers, sizes, keys))
    out = np.empty(len(x), dtype=np.int64)
    for at in range(0, len(x), ELEMENTS_AT_ONCE):
        block = slice(at, at + ELEMENTS_AT_ONCE)
        out[block] = _walk(x[block], size[block] if size.ndim else size, key[block] if key.ndim else key)
    return out


def _walk(x: NDArray[np.uint64], size: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permute until every number is below its size."""
    a = np.ceil(np.sqrt(size.astype(np.float64))).astype(np.uint64)
    b = (size + a - np.uint64(1)) // a
    x = _rounds(x, a, b, key)
    outside = np.flatnonzero(x >= size)
    while len(outside):
        a_, b_, size_, key_ = (array[outside] if array.ndim else array for array in (a, b, size, key))
        x[outside] = _rounds(x[outside], a_, b_, key_)
        outside = outside[x[outside] >= size_]
    return x


def _rounds(x: NDArray[np.uint64], a: NDArray[Any], b: NDArray[Any], key: NDArray[Any]) -> NDArray[np.uint64]:
    """Permute the numbers below ``a * b``, both up to 2**32."""
    high = x // b
    low = x - high * b
    for number, constant in enumerate(ROUND_KEYS):
        source, target, size = (low, high, a) if number % 2 == 0 else (high, low, b)
        mixed = source ^ (key + constant)
        mixed *= MULTIPLIERS[0]
        mixed ^= mixed >> HALF
        mixed *= MULTIPLIERS[1]
        mixed >>= HALF
        mixed *= size
        mixed >>= HALF  # below the size
        target += mixed
        np.minimum(target, target - size, out=target)  # below 0, it wraps to more than any size
    high *= b
    high += low
    return high
