r"""The format of token files ``<prefix>.bin`` and ``<prefix>.idx``, byte for byte that of Megatron-LM.

``.bin`` holds the ids of all sequences back to back. ``.idx`` holds where each sequence and document starts
(little-endian, no padding; S sequences, D + 1 document boundaries)::

    9 bytes   b"MMIDIDX\0\0"
    uint64    version, 1
    uint8     code of the ids' type (DTYPE_CODES)
    uint64    S
    uint64    D + 1
    int32     [S]      tokens of each sequence
    int64     [S]      byte in .bin where each sequence starts
    int64     [D + 1]  sequences before each document, from 0 to S

A document is a run of sequences: usually one, none when it is empty.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
MAX_LENGTH = 2**31 - 1  # tokens of a sequence


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type in which Megatron-LM's preprocessing stores the ids of a vocabulary of that size."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")
