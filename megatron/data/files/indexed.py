"""Token files ``<prefix>.bin`` and ``<prefix>.idx``, read through a memory map.

`indexed_format` says what is in them, `indexed_writer` writes them; the names that callers need are all here.
"""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron.data.errors import DataError
from megatron.data.files import open_files
from megatron.data.files.indexed_format import CODES, HEADER, MAGIC, VERSION, id_dtype
from megatron.data.files.indexed_writer import IndexedDatasetWriter, remove_leftovers

__all__ = [
    "BLOCKS",
    "BLOCK_BYTES",
    "CODES",
    "HEADER",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "id_dtype",
    "remove_leftovers",
]

ENTRIES_PER_CHECK = 1 << 20
BLOCK_BYTES, BLOCKS = 4096, 64  # the sample of .bin that a fingerprint reads; a smaller file is read whole


def _starts(lengths: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Tokens before each of ``n`` sequences, and after the last: int64 ``[n + 1]``."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


class _Header(NamedTuple):
    dtype: np.dtype[Any]
    sequences: int
    boundaries: int


class IndexedDataset:
    """The sequences of a pair of files, read through a memory map.

    Attributes:
        dtype: type of the ids.
        lengths: int32 ``[S]`` tokens of each sequence.
        pointers: int64 ``[S]`` byte where each sequence starts.
        documents: int64 ``[D + 1]`` sequences before each document, and in all.
        num_tokens: tokens of all sequences.
        tokens: ids ``[num_tokens]`` of all sequences, a read-only view of the file.
    """

    def __init__(self, prefix: str | Path, floats: bool = False) -> None:
        """Open ``<prefix>.bin`` and ``<prefix>.idx`` and check them against each other.

        Args:
            prefix: path of the two files without ``.bin`` and ``.idx``.
            floats: whether floating-point numbers will do, which are nobody's ids.

        Raises:
            DataError: when either is missing, cut short, damaged or not such a file.
        """
        self.prefix = str(prefix)
        index = _map(f"{self.prefix}.idx")
        header = self._read_header(index)
        sizes = (HEADER.size, 4 * header.sequences, 8 * header.sequences, 8 * header.boundaries)
        parts = list(accumulate(sizes))
        self._check_index_size(len(index), parts[-1], header.sequences)
        self.dtype = header.dtype
        self.lengths = index[parts[0] : parts[1]].view("<i4")
        self.pointers = index[parts[1] : parts[2]].view("<i8")
        self.documents = index[parts[2] : parts[3]].view("<i8")
        self._check_documents()
        self.num_tokens = self._check_sequences()
        self.tokens = self._map_tokens()
        if self.dtype.kind == "f" and not floats:
            raise DataError(
                f"{self.prefix}.idx: the type is {self.dtype}, and a model is trained on ids, which are whole numbers",
                "write the dataset anew with tools/preprocess_data.py",
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> NDArray[Any]:
        return self.get(i)

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of the index and of a sample of the ids; not of the files' names.

        Of ``.bin`` it reads `BLOCKS` blocks that lie evenly from its first to its last byte: another corpus or another
        tokenizer is found, a few ids changed in a large file are not.
        """
        seen = hashlib.blake2b(digest_size=8)
        for table in (self.lengths, self.documents):  # the pointers follow from the lengths
            seen.update(f"{self.dtype.str} {len(table)};".encode())
            seen.update(table.data)
        ids = self.tokens.view(np.uint8)
        last = max(0, len(ids) - BLOCK_BYTES)
        for start in np.linspace(0, last, BLOCKS, dtype=np.int64).tolist():
            seen.update(ids[start : start + BLOCK_BYTES].data)
        return seen.hexdigest()

    def get(self, i: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Ids ``[length]`` of sequence ``i`` from ``offset`` on, by default all the rest; a read-only view of the file.

        Raises:
            IndexError: when the sequence does not reach so far.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"sequence {i} of {self.prefix}, which has {len(self)}")
        held = int(self.lengths[i])
        end = held if length is None else offset + length
        if not 0 <= offset <= end <= held:
            raise IndexError(f"tokens {offset}..{end} of sequence {i} of {self.prefix}, which has {held}")
        start = int(self.pointers[i]) // self.dtype.itemsize
        return self.tokens[start + offset : start + end]

    def _read_header(self, index: NDArray[np.uint8]) -> _Header:
        if len(index) < HEADER.size:
            self._refuse("idx", "size", f"{len(index)} bytes", f"a header of {HEADER.size} bytes")
        magic, version, code, sequences, boundaries = HEADER.unpack(index[: HEADER.size].tobytes())
        if magic != MAGIC:
            self._refuse("idx", "first 9 bytes", repr(magic), f"{MAGIC!r}: this is no index of tokens")
        if version != VERSION:
            self._refuse("idx", "version", version, VERSION)
        if code not in CODES:
            known = ", ".join(f"{c} ({d.name})" for c, d in CODES.items())
            self._refuse("idx", "type code", code, f"one of {known}")
        if boundaries < 1:
            self._refuse("idx", "number of document boundaries", boundaries, "at least 1")
        return _Header(CODES[code], sequences, boundaries)

    def _check_index_size(self, seen: int, expected: int, sequences: int) -> None:
        if sequences and seen == expected + sequences:
            self._refuse("idx", "size", f"{seen} bytes, as of multimodal data", f"{expected} bytes, as of text")
        if seen != expected:
            self._refuse("idx", "size", f"{seen} bytes", f"{expected} bytes, as its header counts")

    def _check_documents(self) -> None:
        ends = int(self.documents[0]), int(self.documents[-1])
        if ends != (0, len(self)):
            self._refuse("idx", "first and last document boundary", ends, (0, len(self)))
        for first in range(0, len(self.documents), ENTRIES_PER_CHECK):
            part = self.documents[first : first + ENTRIES_PER_CHECK + 1]
            falls = np.flatnonzero(part[1:] < part[:-1])
            if falls.size:
                i = int(falls[0])
                self._refuse("idx", f"boundary {first + i + 1} of the documents", part[i + 1], f"{part[i]} or more")

    def _check_sequences(self) -> int:
        """Every pointer against the lengths before it, a stretch at a time; returns the tokens in all."""
        tokens = 0
        for first in range(0, len(self), ENTRIES_PER_CHECK):
            part = slice(first, first + ENTRIES_PER_CHECK)
            lengths, pointers = self.lengths[part], self.pointers[part]
            if lengths.min() < 0:
                i = first + int(lengths.argmin())
                self._refuse("idx", f"length of sequence {i}", self.lengths[i], "0 or more")
            starts = tokens + _starts(lengths)
            wrong = np.flatnonzero(pointers != starts[:-1] * self.dtype.itemsize)
            if wrong.size:
                i = int(wrong[0])
                self._refuse("idx", f"pointer of sequence {first + i}", pointers[i], starts[i] * self.dtype.itemsize)
            tokens = int(starts[-1])
        return tokens

    def _map_tokens(self) -> NDArray[Any]:
        ids = _map(f"{self.prefix}.bin")
        expected = self.num_tokens * self.dtype.itemsize
        if len(ids) != expected:
            self._refuse("bin", "size", f"{len(ids)} bytes", f"{expected} bytes, as {self.prefix}.idx counts")
        return ids.view(self.dtype)

    def _refuse(self, suffix: str, field: str, seen: object, expected: object) -> NoReturn:
        raise DataError(
            f"{self.prefix}.{suffix}: {field} is {seen}, expected {expected}",
            "copy both files again, or write them anew with tools/preprocess_data.py",
        )


def _map(path: str) -> NDArray[np.uint8]:
    """The bytes of a file, read only when touched (an empty file cannot be mapped)."""
    try:
        if not os.path.getsize(path):
            return np.empty(0, dtype=np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"{path}: {reason}", *_remedies(path, error)) from error


def _remedies(path: str, error: Exception) -> list[str]:
    """What helps against a file that cannot be opened."""
    if open_files.are_too_many(error):
        return [open_files.REMEDY]
    prefix, suffix = os.path.splitext(path)
    for ending in (".bin", ".idx"):
        if prefix.endswith(ending):
            return [f"give the path without {ending}: {prefix.removesuffix(ending)}"]
    if os.path.isdir(prefix):
        return [f"name a pair in that folder: {os.path.join(prefix, 'NAME')}, without .bin/.idx"]
    if suffix == ".bin" and os.path.exists(f"{prefix}.idx"):
        return ["copy both files again"]
    return ["give the path without .bin/.idx, as tools/preprocess_data.py printed it"]
