"""One number for which samples were read: a sum, so that it knows neither an order nor who read what.

Every place of the sample stream contributes 64 bits mixed from the place and from what the sample is, and the
contributions are added modulo 2**64. Ranks add up what each of them read; a checkpoint keeps the sum so far.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

PLACES_PER_BLOCK = 1 << 14  # small enough that the blocks of intermediate values stay in the processor's cache


def fingerprint(*facts: object) -> str:
    """16 hexadecimal digits that say whether two lists of facts are the same."""
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:16]


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit numbers in which every bit of a result depends on every bit of its argument.

    Source: the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014; constants of D. Stafford's variant 13).
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def digest(places: NDArray[np.int64], identities: NDArray[np.uint64], salt: int) -> int:
    """The sum over ``places [n]`` of a mixture of the place, its sample's identity ``[n]`` and ``salt``, mod 2**64."""
    keys = mix(places.astype(np.uint64) ^ np.uint64(salt))
    return int(mix(keys ^ identities).sum(dtype=np.uint64))
