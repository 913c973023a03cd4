"""Token files ``<prefix>.bin`` and ``<prefix>.idx``, byte for byte as Megatron-LM writes them.

``.bin`` holds the ids of all sequences back to back. ``.idx`` says where each sequence and document starts
(little-endian, no padding; S sequences, D + 1 document boundaries)::

    9 bytes   b"MMIDIDX\\0\\0"
    uint64    version, 1
    uint8     code of the ids' type (CODES)
    uint64    S
    uint64    D + 1
    int32     [S]      tokens of each sequence
    int64     [S]      byte in .bin where each sequence starts
    int64     [D + 1]  sequences before each document, from 0 to S

A document is a run of sequences: one as a rule, none when it is empty.
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, NoReturn, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megatron.data.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
HEADER = struct.Struct("<9sQBQQ")
MAX_LENGTH = 2**31 - 1
SEQUENCES_PER_CHECK = 1 << 20
BLOCK_BYTES, BLOCKS = 4096, 64  # the sample of .bin that a fingerprint reads; a smaller file is read whole


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type Megatron-LM's preprocessing stores ids of such a vocabulary in."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedDatasetWriter:
    """Writes a pair of files, document by document, in constant memory per token.

    The files appear under their names only when a ``with`` block ends without an exception, ``.idx`` last: a pair that
    was not finished is never taken for one. A pair already there stays whole until then.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike) -> None:
        self._prefix = str(prefix)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        if self._dtype not in CODES.values():
            raise DataError(f"{self._prefix}: {self._dtype} holds no token ids", "uint16 | int32")
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._beside: dict[str, bytes] = {}
        self._bin: IO[bytes] = open(self._part("bin"), "wb")  # noqa: SIM115 (closed by __exit__)
        self.num_tokens = 0

    @property
    def num_documents(self) -> int:
        """Documents written so far."""
        return len(self._documents) - 1

    def add_sequence(self, tokens: ArrayLike) -> None:
        """Append one sequence of ids ``[n]`` to the document being written.

        Raises:
            DataError: when an id does not fit the type of the file, or the sequence is too long for the format.
        """
        ids = np.asarray(tokens)
        if ids.size > MAX_LENGTH:
            self._too_long(ids.size)
        self._write_ids(ids)
        self._lengths.append(ids.size)

    def end_document(self) -> None:
        """End the document being written; without a sequence it is an empty one."""
        self._documents.append(len(self._lengths))

    def add_document(self, tokens: ArrayLike) -> None:
        """Append a document of one sequence of ids ``[n]``, or of none when ``n`` is 0."""
        ids = np.asarray(tokens)
        if ids.size:
            self.add_sequence(ids)
        self.end_document()

    def add_documents(self, ids: NDArray[Any], lengths: NDArray[np.integer[Any]]) -> None:
        """Append ``n`` documents at once: ``ids [total]`` back to back, ``lengths [n]`` tokens of each (0: empty).

        The files are those of ``n`` calls of `add_document`.

        Raises:
            DataError: when an id does not fit the type of the file, or a document is too long for the format.
            ValueError: when the lengths are negative or do not sum to ``total``.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        if lengths.size and (lengths.min() < 0 or lengths.max() > MAX_LENGTH):
            if lengths.min() < 0:
                raise ValueError(f"{self._prefix}: a document of {lengths.min()} tokens")
            self._too_long(int(lengths.max()))
        if int(lengths.sum()) != len(ids):
            raise ValueError(f"{self._prefix}: lengths sum to {lengths.sum()}, but there are {len(ids)} ids")
        self._write_ids(ids)
        has_tokens = lengths > 0
        self._documents.frombytes((len(self._lengths) + np.cumsum(has_tokens, dtype=np.int64)).tobytes())
        self._lengths.frombytes(lengths[has_tokens].astype(np.intc).tobytes())

    def add_file(self, suffix: str, content: bytes) -> None:
        """A small file ``<prefix>.<suffix>`` that appears together with the pair.

        ``suffix`` may be ``folder/name``; what an older dataset left in such a folder goes.
        """
        self._beside[suffix] = content

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                _sync(self._bin)
                self._publish()
        finally:
            for suffix in ("bin", "idx", *self._beside):
                Path(self._part(suffix)).unlink(missing_ok=True)
            for folder in self._folders():
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
            self._bin.close()  # last: on a full disk it fails once more

    def _publish(self) -> None:
        """Give the files their names, the index last; an older index must not outlive its ids."""
        for folder in self._folders():
            folder.mkdir(exist_ok=True)
        for suffix, content in self._beside.items():
            with open(self._part(suffix), "wb") as file:
                file.write(content)
                _sync(file)
        with open(self._part("idx"), "wb") as file:
            self._write_index(file)
            _sync(file)
        Path(f"{self._prefix}.idx").unlink(missing_ok=True)
        for suffix in ("bin", *self._beside):
            os.replace(self._part(suffix), f"{self._prefix}.{suffix}")
        for folder in self._folders():
            for old in {*folder.iterdir()} - {Path(f"{self._prefix}.{suffix}") for suffix in self._beside}:
                old.unlink()
            _sync_folder(folder)
        os.replace(self._part("idx"), f"{self._prefix}.idx")
        _sync_folder(Path(self._prefix).parent)

    def _folders(self) -> set[Path]:
        """Folders of the files beside the pair."""
        return {Path(f"{self._prefix}.{suffix}").parent for suffix in self._beside if "/" in suffix}

    def _part(self, suffix: str) -> str:
        """Where a file grows until it gets its name."""
        return f"{self._prefix}.{suffix}.{os.getpid()}.part"

    def _write_ids(self, ids: NDArray[Any]) -> None:
        if ids.size and not np.can_cast(ids.dtype, self._dtype, "safe"):
            self._check_range(ids)
        self._bin.write(np.ascontiguousarray(ids, dtype=self._dtype).data)
        self.num_tokens += ids.size

    def _too_long(self, tokens: int) -> NoReturn:
        raise DataError(f"{self._prefix}: a sequence of {tokens} tokens; at most {MAX_LENGTH}", "cut the document")

    def _check_range(self, ids: NDArray[Any]) -> None:
        info = np.iinfo(self._dtype)
        for seen in (ids.min(), ids.max()):
            if not info.min <= seen <= info.max or ids.dtype.kind not in "iu":
                raise DataError(f"{self._prefix}: id {seen} does not fit {self._dtype} ({info.min}..{info.max})")

    def _write_index(self, file: IO[bytes]) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.intc)
        documents = np.frombuffer(self._documents, dtype=np.int64)
        code = next(code for code, dtype in CODES.items() if dtype == self._dtype)
        file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(documents)))
        file.write(lengths.astype("<i4").tobytes())
        file.write((_starts(lengths)[:-1] * self._dtype.itemsize).astype("<i8").tobytes())
        file.write(documents.astype("<i8").tobytes())


def _starts(lengths: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Tokens before each of ``n`` sequences, and after the last: int64 ``[n + 1]``."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make renames in a folder outlast a power cut."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class _Header(NamedTuple):
    dtype: np.dtype[Any]
    sequences: int
    boundaries: int


class IndexedDataset:
    """The sequences of a pair of files, read through a memory map.

    Attributes:
        lengths: int32 ``[S]`` tokens of each sequence.
        documents: int64 ``[D + 1]`` sequences before each document, and in all.
        num_tokens: tokens of all sequences.
    """

    def __init__(self, prefix: str | Path) -> None:
        """Open ``<prefix>.bin`` and ``<prefix>.idx`` and check them against each other.

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
        self._pointers = index[parts[1] : parts[2]].view("<i8")
        self.documents = index[parts[2] : parts[3]].view("<i8")
        self._check_documents()
        self.num_tokens = self._check_sequences()
        self._tokens = self._map_tokens()

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
        ids = self._tokens.view(np.uint8)
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
        start = int(self._pointers[i]) // self.dtype.itemsize
        return self._tokens[start + offset : start + end]

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
        if (self.documents[1:] < self.documents[:-1]).any():
            self._refuse("idx", "document boundaries", "one below the one before it", "a rising list")

    def _check_sequences(self) -> int:
        """Every pointer against the lengths before it, a stretch at a time; returns the tokens in all."""
        tokens = 0
        for first in range(0, len(self), SEQUENCES_PER_CHECK):
            part = slice(first, first + SEQUENCES_PER_CHECK)
            lengths, pointers = self.lengths[part], self._pointers[part]
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
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}", "give the path without .bin/.idx, as tools/preprocess_data.py printed it"
        ) from error
