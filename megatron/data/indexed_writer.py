"""Write token files ``<prefix>.bin`` and ``<prefix>.idx``, byte for byte in Megatron-LM's format.

A pair is complete or absent, and memory does not grow with its size: ids and index tables are written to temporary
files, synced, and renamed at the end, the index last.

``.bin`` holds the ids of all sequences back to back. ``.idx`` holds where each sequence and document starts (little-
endian, no padding; S sequences, D + 1 document boundaries)::

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

import glob
import os
import secrets
import shlex
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megatron.checkpoint.durable_files import (
    LockState,
    durable_rename,
    sync_file,
    sync_folder,
    try_lock,
    write_file,
)
from megatron.data.errors import DataError
from megatron.data.tokenizers.tokenizer import FILES_SUFFIX, RECORD_SUFFIX

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
MAX_SEQUENCE_LENGTH = 2**31 - 1  # tokens of a sequence


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type in which Megatron-LM's preprocessing stores the ids of a vocabulary of that size."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


COPY_BYTES = 8 << 20
TABLE_BLOCK = 1 << 20  # table entries in memory at once


class IndexedDatasetWriter:
    """Writes a pair of token files document by document, in constant memory.

    Use it in a ``with`` block. The files get their names only if the block ends without an exception, ``.idx`` last, so
    that an unfinished pair is never read. An existing pair stays intact until then.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike) -> None:
        """Prepare ``<prefix>.bin`` and ``<prefix>.idx`` for ids of a type in `DTYPE_CODES`; creates no file yet.

        Raises:
            DataError: when the format does not have the type.
        """
        self._prefix = str(prefix)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        if self._dtype not in DTYPE_CODES.values():
            raise DataError(f"{self._prefix}: the format has no {self._dtype}", "uint16 | int32")
        self._extra_files: dict[str, bytes] = {}
        self._unwanted: list[str] = []
        self._sequences = 0
        self._sequences_of_documents = 0
        self._published = False
        self._unique = f"{os.getpid()}-{secrets.token_hex(4)}"  # another container may have the same process id
        self.num_documents = 0
        self.num_tokens = 0

    def __enter__(self) -> Self:
        """Create the temporary files.

        Raises:
            OSError: when the folder cannot be written.
        """
        folder = Path(self._prefix).parent
        with ExitStack() as files:
            # the index tables grow in unnamed files, which vanish with the process
            self._lengths: IO[bytes] = files.enter_context(tempfile.TemporaryFile(dir=folder))
            self._boundaries: IO[bytes] = files.enter_context(tempfile.TemporaryFile(dir=folder))
            self._bin: IO[bytes] = files.enter_context(open(self._part("bin"), "xb"))
            with suppress(OSError):  # where files cannot be locked, leftovers are never removed
                try_lock(self._bin)
            self._open = files.pop_all()
        self._boundaries.write(np.zeros(1, "<i8").data)
        return self

    def add_sequence(self, tokens: ArrayLike) -> None:
        """Append one sequence of ids ``[n]`` to the current document.

        Raises:
            DataError: when an id does not fit the file's type, or the sequence is too long for the format.
        """
        ids = np.asarray(tokens)
        if ids.size > MAX_SEQUENCE_LENGTH:
            self._too_long(ids.size)
        self._write_ids(ids)
        self._add_lengths(np.array([ids.size]))

    def end_document(self) -> None:
        """End the current document; it is empty if no sequence was added."""
        self._add_boundaries(np.array([self._sequences]))

    def add_document(self, tokens: ArrayLike) -> None:
        """Append a document of one sequence of ids ``[n]``, or an empty one when ``n`` is 0."""
        ids = np.asarray(tokens)
        if ids.size:
            self.add_sequence(ids)
        self.end_document()

    def add_documents(self, ids: NDArray[Any], lengths: NDArray[np.integer[Any]]) -> None:
        """Append ``n`` documents: ``ids [total]`` back to back, ``lengths [n]`` tokens of each (0: empty).

        The files are the same as after ``n`` calls of `add_document`.

        Raises:
            DataError: when an id does not fit the file's type, or a document is too long for the format.
            ValueError: when the lengths are negative or do not sum to ``total``.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        if lengths.size and lengths.min() < 0:
            raise ValueError(f"{self._prefix}: a document of {lengths.min()} tokens")
        if lengths.size and lengths.max() > MAX_SEQUENCE_LENGTH:
            self._too_long(int(lengths.max()))
        if int(lengths.sum()) != ids.size:
            raise ValueError(f"{self._prefix}: lengths sum to {lengths.sum()}, but there are {ids.size} ids")
        self._write_ids(ids)
        has_tokens = lengths > 0
        self._add_boundaries(self._sequences + np.cumsum(has_tokens))
        self._add_lengths(lengths[has_tokens])

    def add_pair(
        self,
        bin_path: str | Path,
        lengths: NDArray[np.int32],
        boundaries: NDArray[np.int64],
        report: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Append all documents of another pair of the same id type, copying its bytes.

        Args:
            bin_path: its ids.
            lengths: ``[S]`` tokens of each sequence.
            boundaries: ``[D + 1]`` sequences before each document, and in all.
            report: called with the size in bytes of every block copied.

        Raises:
            DataError: when the file does not match the tables.
        """
        for first in range(1, len(boundaries), TABLE_BLOCK):
            self._add_boundaries(boundaries[first : first + TABLE_BLOCK] + self._sequences)
        tokens_before = self.num_tokens
        for first in range(0, len(lengths), TABLE_BLOCK):
            self._add_lengths(lengths[first : first + TABLE_BLOCK])
            self.num_tokens += int(lengths[first : first + TABLE_BLOCK].sum(dtype=np.int64))
        expected = (self.num_tokens - tokens_before) * self._dtype.itemsize
        copied = self._copy(bin_path, report)
        if copied != expected:
            raise DataError(
                f"{bin_path}: {copied} bytes were read, expected {expected}",
                "merge again after all writers have finished",
            )

    def add_file(self, suffix: str, content: bytes) -> None:
        """Add a small file ``<prefix>.<suffix>`` that is published together with the pair.

        ``suffix`` may be ``folder/name``; other files in such a folder are removed.
        """
        self._extra_files[suffix] = content

    def remove_on_publish(self, suffix: str) -> None:
        """Remove an older dataset's ``<prefix>.<suffix>`` at publication, unless it was added to this one."""
        self._unwanted.append(suffix)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._published:
                publish_all([self])
        finally:
            for suffix in ("bin", "idx", *self._extra_files):
                Path(self._part(suffix)).unlink(missing_ok=True)
            for folder in self._folders():
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
            self._open.close()  # last, because on a full disk it raises again

    def _prepare(self) -> None:
        """Write and fsync everything, so that only renames are left."""
        if self._sequences != self._sequences_of_documents:
            raise ValueError(f"{self._prefix}: the last document was not ended (end_document)")
        self._check_targets()
        sync_file(self._bin)
        for folder in self._folders():
            folder.mkdir(exist_ok=True)
        for suffix, content in self._extra_files.items():
            write_file(Path(self._part(suffix)), content)
        with open(self._part("idx"), "wb") as file:
            self._write_index(file)
            sync_file(file)

    def _check_targets(self) -> None:
        """Refuse folders in the place of files, while an older pair is still intact."""
        targets = [Path(f"{self._prefix}.{suffix}") for suffix in ("bin", "idx", *self._extra_files)]
        targets += [path for folder in self._folders() if folder.is_dir() for path in folder.iterdir()]
        for path in targets:
            if path.is_dir():
                raise DataError(
                    f"{path} is a folder, but a file must be written there", f"rm -r {shlex.quote(str(path))}"
                )

    def _name_ids(self) -> None:
        """Rename everything but the index."""
        self._remove_unwanted()
        for suffix in ("bin", *self._extra_files):
            os.rename(self._part(suffix), f"{self._prefix}.{suffix}")
        for folder in self._folders():
            for old in {*folder.iterdir()} - {Path(f"{self._prefix}.{suffix}") for suffix in self._extra_files}:
                old.unlink()
            sync_folder(folder)

    def _name_index(self) -> None:
        durable_rename(Path(self._part("idx")), Path(f"{self._prefix}.idx"))
        self._published = True

    def _remove_unwanted(self) -> None:
        for suffix in self._unwanted:
            path = Path(f"{self._prefix}.{suffix}")
            if suffix in self._extra_files or path in self._folders():
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _folders(self) -> set[Path]:
        """Return the folders of the added files."""
        return {Path(f"{self._prefix}.{suffix}").parent for suffix in self._extra_files if "/" in suffix}

    def _part(self, suffix: str) -> str:
        """Return the temporary name of a file."""
        return f"{self._prefix}.{suffix}.{self._unique}.part"

    def _write_ids(self, ids: NDArray[Any]) -> None:
        if ids.size and not np.can_cast(ids.dtype, self._dtype, "safe"):
            self._check_values(ids)
        self._bin.write(np.ascontiguousarray(ids, dtype=self._dtype).data)
        self.num_tokens += ids.size

    def _check_values(self, ids: NDArray[Any]) -> None:
        """Refuse values that the file's type cannot hold exactly."""
        if self._dtype.kind == "f":
            with np.errstate(over="ignore"):
                stored = ids.astype(self._dtype)
            changed = ids[(stored != ids) & (ids == ids)]
            if changed.size:
                raise DataError(f"{self._prefix}: {changed[0]} does not fit {self._dtype}, which would round it")
            return
        info = np.iinfo(self._dtype)
        for value in (ids.min(), ids.max()):
            if not info.min <= value <= info.max or ids.dtype.kind not in "iu":
                raise DataError(f"{self._prefix}: id {value} does not fit {self._dtype} ({info.min}..{info.max})")

    def _too_long(self, tokens: int) -> NoReturn:
        raise DataError(
            f"{self._prefix}: a sequence of {tokens} tokens; at most {MAX_SEQUENCE_LENGTH}", "cut the document"
        )

    def _add_lengths(self, lengths: NDArray[np.integer[Any]]) -> None:
        self._lengths.write(np.ascontiguousarray(lengths, dtype="<i4").data)
        self._sequences += len(lengths)

    def _add_boundaries(self, boundaries: NDArray[np.integer[Any]]) -> None:
        """Append ``boundaries [n]``: sequences before the end of each of ``n`` documents."""
        self._boundaries.write(np.ascontiguousarray(boundaries, dtype="<i8").data)
        self.num_documents += len(boundaries)
        if len(boundaries):
            self._sequences_of_documents = int(boundaries[-1])

    def _copy(self, path: str | Path, report: Callable[[int], None]) -> int:
        copied = 0
        with open(path, "rb") as source:
            while block := source.read(COPY_BYTES):
                self._bin.write(block)
                copied += len(block)
                report(len(block))
        return copied

    def _write_index(self, file: IO[bytes]) -> None:
        code = next(code for code, dtype in DTYPE_CODES.items() if dtype == self._dtype)
        file.write(INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, code, self._sequences, self.num_documents + 1))
        self._lengths.seek(0)
        shutil.copyfileobj(self._lengths, file)
        self._lengths.seek(0)
        start = 0
        while block := self._lengths.read(4 * TABLE_BLOCK):
            ends = start + np.cumsum(np.frombuffer(block, "<i4"), dtype=np.int64) * self._dtype.itemsize
            file.write(np.append(np.int64(start), ends[:-1]).astype("<i8").data)
            start = int(ends[-1])
        self._boundaries.seek(0)
        shutil.copyfileobj(self._boundaries, file)


def publish_all(writers: Sequence[IndexedDatasetWriter]) -> None:
    """Publish the files of several writers at once, before their ``with`` blocks end.

    Everything that can fail for lack of space or permission is done for all of them first and leaves older pairs
    intact. While files are renamed no pair has an index, so that an old one is never read beside a new one.

    Raises:
        ValueError: when a last document was not ended.
        DataError: when a folder is in the place of a file.
        OSError: when the disk refuses.
    """
    for writer in writers:
        writer._prepare()
    for writer in writers:
        Path(f"{writer._prefix}.idx").unlink(missing_ok=True)  # an older index must not outlive its ids
    for writer in writers:
        writer._name_ids()
    for writer in writers:
        writer._name_index()


def remove_unfinished_files(prefix: str | Path) -> list[Path]:
    """Remove the temporary files of killed writers of a pair, and return them.

    A writer locks its ids while it lives, on any machine. Where files cannot be locked, nothing is removed.
    """
    removed = []
    for ids in glob.glob(f"{glob.escape(str(prefix))}.bin.*.part"):
        with suppress(OSError), open(ids, "r+b") as file:
            if try_lock(file) is not LockState.ACQUIRED:
                continue
            writer = ids.split(".")[-2]
            for path in map(Path, glob.glob(f"{glob.escape(str(prefix))}.*.{writer}.part")):
                path.unlink()
                removed.append(path)
    return removed


DATASET_SUFFIXES = ("bin", "idx", RECORD_SUFFIX, FILES_SUFFIX)
"""Suffixes of a dataset's files and folder: ``<prefix>.<suffix>``."""


def check_not_existing(prefixes: Iterable[str], overwrite: bool) -> None:
    """Refuse prefixes that already have files, unless ``overwrite``.

    Raises:
        DataError: naming an existing file.
    """
    found = [
        path for prefix in prefixes for suffix in DATASET_SUFFIXES if os.path.lexists(path := f"{prefix}.{suffix}")
    ]
    if found and not overwrite:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise DataError(f"{found[0]} is there already{more}", "--overwrite", "another --output-prefix")
