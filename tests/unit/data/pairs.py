"""Files for tests: pairs of token files, by the project and independently of it; compressed text."""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import DTypeLike

from megatron.data.indexed_writer import IndexedDatasetWriter

GOLDEN = Path(__file__).parents[2] / "golden" / "megatron"
"""Files of Megatron-LM."""

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
"""By suffix."""

LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "f", 8: "H"}
"""Code of the ids' type in the format, and its letter for ``struct``."""

NAMES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
"""The same for numpy."""


def write(
    prefix: Path,
    documents: Iterable[Sequence[float]],
    dtype: DTypeLike = np.uint16,
    extra_files: Mapping[str, bytes] | None = None,
) -> Path:
    with IndexedDatasetWriter(prefix, dtype, extra_files) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def packed(documents: Sequence[Sequence[Sequence[float]]], code: int) -> tuple[bytes, bytes]:
    """The bytes of ``.bin`` and ``.idx`` of documents of sequences, number by number."""
    sequences = [sequence for document in documents for sequence in document]
    ids = [number for sequence in sequences for number in sequence]
    lengths = [len(sequence) for sequence in sequences]
    size = struct.calcsize(f"<{LETTERS[code]}")
    starts = [sum(lengths[:i]) * size for i in range(len(lengths))]
    boundaries = [sum(map(len, documents[:i])) for i in range(len(documents) + 1)]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(boundaries))
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(starts)}q", *starts)
    index += struct.pack(f"<{len(boundaries)}q", *boundaries)
    return struct.pack(f"<{len(ids)}{LETTERS[code]}", *ids), index


def write_packed(prefix: Path, documents: Sequence[Sequence[Sequence[float]]], code: int = 4) -> Path:
    """Write documents of sequences without the project's writer."""
    for suffix, content in zip(("bin", "idx"), packed(documents, code)):
        prefix.with_name(f"{prefix.name}.{suffix}").write_bytes(content)
    return prefix


def pair(prefix: Path) -> tuple[bytes, bytes]:
    """The bytes of the two files there are."""
    return prefix.with_name(prefix.name + ".bin").read_bytes(), prefix.with_name(prefix.name + ".idx").read_bytes()


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}
