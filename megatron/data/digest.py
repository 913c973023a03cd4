"""A 64-bit digest of the samples that were read.

Each place of the sample stream contributes 64 bits mixed from the place and from the sample's identity. The
contributions are added modulo 2**64, so ranks can sum what each of them read in any order. A checkpoint stores the sum
so far, which proves on resume that the data are the same.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

PLACES_PER_BLOCK = 1 << 14  # so that intermediate arrays stay in the CPU cache


def fingerprint(*facts: object) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a list of facts."""
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:16]


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply a bijection on 64-bit integers in which every output bit depends on every input bit.

    Source: the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), with the constants of D. Stafford's
    variant 13.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def digest(places: NDArray[np.int64], identities: NDArray[np.uint64], salt: int) -> int:
    """Return the sum modulo 2**64 of a hash of each place ``[n]``, its sample's identity ``[n]`` and ``salt``."""
    keys = mix(places.astype(np.uint64) ^ np.uint64(salt))
    return int(mix(keys ^ identities).sum(dtype=np.uint64))
