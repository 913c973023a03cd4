"""Checksums of token files, ``PREFIX.sums``: with them, wrong bytes from an object store are never used.

Format, little-endian::

    8 bytes   MTSUMS01
    uint64    bytes of a chunk, 262144
    uint64    bytes of .bin
    uint64    xxh3 of .idx
    8 bytes   `IndexedDataset.fingerprint`, so that it is known without reading .bin
    uint64    [chunks]  xxh3 of each chunk of .bin
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron.checkpoint.durable_files import publish_file
from megatron.config.data_store import CHUNK_BYTES
from megatron.data.block_cache import chunk_sums
from megatron.data.errors import DataError

SUMS_SUFFIX = "sums"
HEADER = struct.Struct("<8sQQQ8s")
MAGIC = b"MTSUMS01"
READ_BYTES = 64 * CHUNK_BYTES


class TokenSums(NamedTuple):
    """The checksums of a pair."""

    index_sum: int  # xxh3 of .idx
    fingerprint: str  # 16 hexadecimal digits
    chunks: NDArray[np.uint64]  # uint64 [chunks], xxh3 of each chunk of .bin

    @classmethod
    def of(cls, prefix: str, fingerprint: str) -> TokenSums:
        """Read a pair on a disk, and compute its checksums."""
        with open(f"{prefix}.idx", "rb") as file:
            index = int(hashlib.file_digest(file, xxhash.xxh3_64).hexdigest(), 16)
        with open(f"{prefix}.bin", "rb") as file:
            chunks = [chunk_sums(block) for block in iter(lambda: file.read(READ_BYTES), b"")]
        return cls(index, fingerprint, np.concatenate([np.zeros(0, "<u8"), *chunks]))

    def write(self, prefix: str, size: int) -> None:
        """Write ``PREFIX.sums`` of a ``.bin`` of ``size`` bytes."""
        header = HEADER.pack(MAGIC, CHUNK_BYTES, size, self.index_sum, bytes.fromhex(self.fingerprint))
        publish_file(Path(f"{prefix}.{SUMS_SUFFIX}"), header + self.chunks.tobytes())

    @classmethod
    def read(cls, prefix: str, size: int) -> TokenSums:
        """Map ``PREFIX.sums`` of a ``.bin`` of ``size`` bytes.

        Raises:
            DataError: if it is damaged or of another pair.
        """
        path = Path(f"{prefix}.{SUMS_SUFFIX}")
        content = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
        known = (MAGIC, CHUNK_BYTES, size, HEADER.size - (-size // CHUNK_BYTES) * 8)
        head = HEADER.unpack(content[: HEADER.size].tobytes()) if len(content) >= HEADER.size else (b"", 0, 0, 0, b"")
        if (*head[:3], len(content)) != known:
            seen = f"{path} does not hold the checksums of a .bin of {size:,} bytes"
            raise DataError(seen, "python tools/upload_dataset.py PREFIX URI")
        return cls(head[3], head[4].hex(), np.asarray(content[HEADER.size :]).view("<u8"))

    @staticmethod
    def read_index_sum(path: Path) -> int:
        """Return the checksum of ``.idx`` in a file of checksums."""
        with open(path, "rb") as file:
            head = file.read(HEADER.size)
        return int(HEADER.unpack(head)[3]) if len(head) == HEADER.size else -1
