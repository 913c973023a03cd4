"""Read token files ``<prefix>.bin`` and ``<prefix>.idx``, Megatron-LM's format, through a memory map.

A prefix may be in an object store, ``s3://bucket/prefix`` (:mod:`megatron.data.token_store`).

``.bin`` holds the ids of all sequences back to back. ``.idx`` holds where each sequence and document starts (little-
endian, no padding; S sequences, D + 1 document boundaries)::

    9 bytes   MMIDIDX and two zero bytes
    uint64    version, 1
    uint8     code of the ids' type (DTYPE_CODES)
    uint64    S
    uint64    D + 1
    int32     [S]      tokens of each sequence
    int64     [S]      byte in .bin where each sequence starts
    int64     [D + 1]  sequences before each document, from 0 to S

A document is a run of sequences: usually one, none when it is empty. `IndexedDataset` checks an index against itself
and against the size of ``.bin``. The writer is in `indexed_writer`.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import resource
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.errors import DataError
from megatron.data.known_files import KnownFiles, KnownPair
from megatron.data.manifest import MANIFEST_SUFFIX, recorded_fingerprint
from megatron.data.prefixes import remote_prefix

INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_VERSION = 1
INDEX_HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
OPEN_FILES_FIX = "ulimit -n 65536"
ENTRIES_PER_CHECK = 1 << 20
FINGERPRINT_BLOCK_BYTES, FINGERPRINT_BLOCKS = 4096, 64  # of .bin that a fingerprint reads; a smaller file is read whole


def raise_open_file_limit() -> None:
    """Raise the soft limit on open files, against which mapped files count, to the hard limit, if permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # some systems report a hard limit that they refuse to set
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def is_too_many_open_files(error: BaseException) -> bool:
    """Return True if a file could not be opened because too many are open."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


class TokenArray(Protocol):
    """Ids of a ``.bin``: an array, or what reads them from an object store."""

    @property
    def nbytes(self) -> int:
        """Bytes of all ids."""

    def __len__(self) -> int: ...

    def __getitem__(self, ids: slice, /) -> NDArray[Any]: ...

    def view(self, dtype: np.dtype[Any], /) -> TokenArray:
        """Return the same bytes as ids of another type."""


class IndexedDataset:
    """The sequences of a pair of token files, read through a memory map."""

    def __init__(
        self, prefix: str | Path, floats: bool = False, verify: bool = True, known_files: KnownFiles | None = None
    ) -> None:
        """Open ``<prefix>.bin`` and ``<prefix>.idx`` and check them against each other.

        Args:
            prefix: path or URI of the two files without ``.bin`` and ``.idx``.
            floats: accept floating-point numbers, which are not token ids.
            verify: check every entry of the index; False reads only its header and the sizes of both files.
            known_files: records of pairs that were checked before, which are not checked again.

        Raises:
            DataError: when either is missing, truncated, damaged or in another format.
        """
        self.prefix = str(prefix)
        remote = remote_prefix(self.prefix)
        index = _map(f"{self.prefix if remote is None else remote.local}.idx")
        self.dtype, sequences, boundaries = self._read_header(index)
        ends = list(accumulate((INDEX_HEADER.size, 4 * sequences, 8 * sequences, 8 * boundaries)))
        if sequences and len(index) == ends[-1] + sequences:
            self._refuse("idx", "size", f"{len(index)} bytes, as of multimodal data", f"{ends[-1]} bytes, as of text")
        if len(index) != ends[-1]:
            self._refuse("idx", "size", f"{len(index)} bytes", f"{ends[-1]} bytes, as its header counts")
        self.lengths = index[ends[0] : ends[1]].view("<i4")  # int32 [S], tokens of each sequence
        self.pointers = index[ends[1] : ends[2]].view("<i8")  # int64 [S], byte where each sequence starts
        self.documents = index[ends[2] : ends[3]].view("<i8")  # int64 [D + 1], sequences before each document
        ids: TokenArray = _map(f"{self.prefix}.bin") if remote is None else remote.tokens
        self.num_tokens = len(ids) // self.dtype.itemsize  # of all sequences
        self._known_files = known_files if verify and remote is None else None
        self._known = None if self._known_files is None else self._known_files.read(self.prefix)
        if verify:
            if self._known is None:
                self._check_documents()
            self.num_tokens = self._check_sequences() if self._known is None else self._known.tokens
            expected = self.num_tokens * self.dtype.itemsize
            if len(ids) != expected:
                self._refuse("bin", "size", f"{len(ids)} bytes", f"{expected} bytes, as {self.prefix}.idx counts")
        whole = ids[: self.num_tokens * self.dtype.itemsize] if remote is None else ids
        self.tokens: TokenArray = whole.view(self.dtype)  # ids [num_tokens], read-only
        self.remote = remote  # None for files on a disk
        if self.dtype.kind == "f" and not floats:
            raise DataError(
                f"{self.prefix}.idx: the type is {self.dtype}, but token ids are whole numbers",
                "write the dataset again with tools/preprocess_data.py",
            )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return len(self.documents) - 1

    def __getitem__(self, i: int) -> NDArray[Any]:
        return self.get(i)

    def count_tokens(self, sequences: range) -> int:
        """Return the number of tokens in consecutive sequences."""
        begin, end = (
            self.num_tokens * self.dtype.itemsize if place == len(self) else int(self.pointers[place])
            for place in (sequences.start, sequences.stop)
        )
        return (end - begin) // self.dtype.itemsize

    @cached_property
    def fingerprint(self) -> str:
        """`compute_fingerprint` of the pair.

        Raises:
            DataError: when the manifest of the pair records another one.
        """
        if self._known is not None:
            return self._known.fingerprint
        facts = self.dtype, self.lengths, self.documents, self.tokens
        if self.remote is not None:  # the manifest's checksums are compared with all that is read
            return self.remote.fingerprint(lambda sample: compute_fingerprint(*facts, sample))
        computed = compute_fingerprint(*facts)
        recorded = recorded_fingerprint(self.prefix)
        if recorded not in (None, computed):
            raise DataError(
                f"{self.prefix}.bin and .idx are not the files of {self.prefix}.{MANIFEST_SUFFIX}: "
                f"their fingerprint is {computed}, expected {recorded}",
                "copy the files of the pair again",
                f"if they are right: rm {self.prefix}.{MANIFEST_SUFFIX}",
            )
        if self._known_files is not None:
            self._known_files.write(self.prefix, KnownPair(computed, self.num_tokens))
        return computed

    def get(self, i: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return ids ``[length]`` of sequence ``i`` from ``offset`` on, by default to its end, as a read-only view.

        Raises:
            IndexError: when the sequence is shorter.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"sequence {i} of {self.prefix}, which has {len(self)}")
        available = int(self.lengths[i])
        end = available if length is None else offset + length
        if not 0 <= offset <= end <= available:
            raise IndexError(f"tokens {offset}..{end} of sequence {i} of {self.prefix}, which has {available}")
        start = int(self.pointers[i]) // self.dtype.itemsize
        return self.tokens[start + offset : start + end]

    def blocks(self, size: int) -> Iterator[memoryview]:
        """Yield the bytes of ``.bin`` in order, up to ``size`` at a time; each block is valid until the next one.

        Files are not mapped, but read into one buffer: new memory for each block takes longer than the rest of a copy.
        """
        if self.remote is not None:
            tokens = self.remote.tokens
            yield from (tokens[start : start + size].data for start in range(0, len(tokens), size))
            return
        buffer = memoryview(bytearray(size))
        with open(f"{self.prefix}.bin", "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                yield buffer[:count]

    def _read_header(self, index: NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
        """Return the type of the ids, and the numbers of sequences and document boundaries."""
        if len(index) < INDEX_HEADER.size:
            self._refuse("idx", "size", f"{len(index)} bytes", f"a header of {INDEX_HEADER.size} bytes")
        magic, version, code, sequences, boundaries = INDEX_HEADER.unpack(index[: INDEX_HEADER.size].tobytes())
        if magic != INDEX_MAGIC:
            self._refuse("idx", "first 9 bytes", repr(magic), f"{INDEX_MAGIC!r}: this is not a token index")
        if version != INDEX_VERSION:
            self._refuse("idx", "version", version, INDEX_VERSION)
        if code not in DTYPE_CODES:
            known = ", ".join(f"{c} ({d.name})" for c, d in DTYPE_CODES.items())
            self._refuse("idx", "type code", code, f"one of {known}")
        if boundaries < 1:
            self._refuse("idx", "number of document boundaries", boundaries, "at least 1")
        return DTYPE_CODES[code], sequences, boundaries

    def _check_documents(self) -> None:
        """Check that the boundaries rise from 0 to the number of sequences, block by block."""
        ends = int(self.documents[0]), int(self.documents[-1])
        if ends != (0, len(self)):
            self._refuse("idx", "first and last document boundary", ends, (0, len(self)))
        for first in range(0, len(self.documents), ENTRIES_PER_CHECK):
            block = self.documents[first : first + ENTRIES_PER_CHECK + 1]
            decreases = np.flatnonzero(block[1:] < block[:-1])
            if decreases.size:
                i = int(decreases[0])
                self._refuse("idx", f"boundary {first + i + 1} of the documents", block[i + 1], f"{block[i]} or more")

    def _check_sequences(self) -> int:
        """Check every pointer against the lengths before it, block by block; return the total tokens."""
        tokens = 0
        for first in range(0, len(self), ENTRIES_PER_CHECK):
            block = slice(first, first + ENTRIES_PER_CHECK)
            lengths, pointers = self.lengths[block], self.pointers[block]
            if lengths.min() < 0:
                i = first + int(lengths.argmin())
                self._refuse("idx", f"length of sequence {i}", self.lengths[i], "0 or more")
            starts = np.concatenate(([tokens], tokens + np.cumsum(lengths, dtype=np.int64)))
            wrong = np.flatnonzero(pointers != starts[:-1] * self.dtype.itemsize)
            if wrong.size:
                i = int(wrong[0])
                self._refuse("idx", f"pointer of sequence {first + i}", pointers[i], starts[i] * self.dtype.itemsize)
            tokens = int(starts[-1])
        return tokens

    def _refuse(self, suffix: str, field: str, seen: object, expected: object) -> NoReturn:
        raise DataError(
            f"{self.prefix}.{suffix}: {field} is {seen}, expected {expected}",
            "copy both files again, or write them again with tools/preprocess_data.py",
        )


def compute_fingerprint(
    dtype: np.dtype[Any],
    lengths: NDArray[Any],
    documents: NDArray[Any],
    tokens: TokenArray,
    sample: Callable[[Sequence[int], int], Iterable[bytes]] | None = None,
) -> str:
    """Return 16 hexadecimal digits of the index and of a sample of the ids, independent of file names.

    Reads `FINGERPRINT_BLOCKS` evenly spaced blocks of ``.bin``, with ``sample(starts, size)`` if it is given: another
    corpus or tokenizer is detected, a few changed ids in a large file are not.
    """
    digest = hashlib.blake2b(digest_size=8)
    for table in (lengths, documents):  # the pointers follow from the lengths
        digest.update(f"{dtype.str} {len(table)};".encode())
        digest.update(table.data)
    last = max(0, tokens.nbytes - FINGERPRINT_BLOCK_BYTES)
    starts = np.linspace(0, last, FINGERPRINT_BLOCKS, dtype=np.int64).tolist()
    ids = tokens.view(np.dtype("u1"))
    blocks = (ids[at : at + FINGERPRINT_BLOCK_BYTES].tobytes() for at in starts)
    for block in blocks if sample is None else sample(starts, FINGERPRINT_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def _map(path: str) -> NDArray[np.uint8]:
    """Map a file's bytes; an empty file cannot be mapped and gives an empty array."""
    try:
        if not os.path.getsize(path):
            return np.empty(0, dtype=np.uint8)
        with open(path, "rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        fix = OPEN_FILES_FIX if is_too_many_open_files(error) else _path_fix(path)
        raise DataError(f"{path}: {reason}", fix) from error


def _path_fix(path: str) -> str:
    """Return the fix for a file that cannot be opened."""
    prefix, suffix = os.path.splitext(path)
    for ending in (".bin", ".idx"):
        if prefix.endswith(ending):
            return f"give the path without {ending}: {prefix.removesuffix(ending)}"
    if os.path.isdir(prefix):
        return f"name a pair in that folder: {os.path.join(prefix, 'NAME')}, without .bin/.idx"
    if suffix == ".bin" and os.path.exists(f"{prefix}.idx"):
        return "copy both files again"
    return "give the path without .bin/.idx, as tools/preprocess_data.py printed it"
