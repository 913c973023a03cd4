"""Write and merge token files ``<prefix>.bin`` and ``<prefix>.idx``, byte for byte in Megatron-LM's format.

The format is described in `indexed_dataset`. A pair is complete or absent, and memory does not grow with its size:
ids and index tables are written to temporary files, synced, and renamed at the end, the index last. A merged pair is
the one that a single preprocessing of all the text would have written.
"""

from __future__ import annotations

import glob
import os
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megatron.checkpoint.durable_files import (
    FlushedFile,
    LockState,
    durable_rename,
    sync_file,
    sync_folder,
    try_lock,
    write_file,
)
from megatron.config.data_store import is_remote
from megatron.config.files import read_small
from megatron.config.text import listed
from megatron.data.document_origins import RUN, UNKNOWN_FILE, DocumentOrigins, OriginsWriter
from megatron.data.errors import DataError
from megatron.data.indexed_dataset import (
    DTYPE_CODES,
    INDEX_HEADER,
    INDEX_MAGIC,
    INDEX_VERSION,
    IndexedDataset,
    compute_fingerprint,
)
from megatron.data.manifest import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    MANIFEST_SUFFIX,
    ORIGINS_SUFFIX,
    BlockChecksums,
    DatasetManifest,
    FileChecksums,
    merge_fields,
)
from megatron.data.prefixes import local_prefix
from megatron.data.tokenizers.base import read_tokenizer_file
from megatron.data.tokenizers.tokenizer import (
    COPY_FILES_FIX,
    FILES_SUFFIX,
    RECORD_SUFFIX,
    TokenizerRecord,
    have_same_ids,
    read_tokenizer_record,
    refuse_outside_links,
)

MAX_SEQUENCE_LENGTH = 2**31 - 1  # tokens of a sequence
COPY_BYTES = 1 << 20  # small enough for the processor's cache, where the checksums find them
TABLE_BLOCK = 1 << 20  # table entries in memory at once
RESUME = "resume"  # in the names of the files of a writer that can be continued
RESUME_SUFFIXES = ("bin", "lengths", "boundaries", "runs", "checksums")
INDEX_ENTRY_BYTES = 20  # index entry of a document of one sequence: length, pointer and boundary
SHARED_BY_SHARDS = ("corpus", "options", "steps", "sentences")  # fields of their manifests
DATASET_SUFFIXES = ("bin", "idx", ORIGINS_SUFFIX, MANIFEST_SUFFIX, RECORD_SUFFIX, FILES_SUFFIX)
"""Suffixes of a dataset's files and folder, ``<prefix>.<suffix>``."""


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type in which Megatron-LM's preprocessing stores the ids of a vocabulary of that size."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def sequences_before_ends(lengths: NDArray[np.integer[Any]], counts: NDArray[np.int64] | None) -> NDArray[Any]:
    """Return the number of sequences up to the end of each document ``[n]``; see `IndexedDatasetWriter.add_documents`.

    Sequences without ids do not count.
    """
    sequences = np.cumsum(lengths > 0)
    return sequences if counts is None else np.append(0, sequences)[np.cumsum(counts)]


class IndexedDatasetWriter:
    """Writes a pair of token files document by document, in constant memory.

    Use it in a ``with`` block. The files get their names only if the block ends without an exception, ``.idx`` last, so
    that an unfinished pair is never read. An existing pair stays intact until then.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: DTypeLike,
        extra_files: Mapping[str, bytes] | None = None,
        resume: Sequence[int] | None = None,
        origins: Sequence[str] | None = None,
        manifest: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare ``<prefix>.bin`` and ``<prefix>.idx`` for ids of a type in `DTYPE_CODES`; creates no file yet.

        Args:
            prefix: path of the files without their suffixes.
            dtype: of the ids.
            extra_files: small files that are published together with the pair, by suffix, which may be
                ``folder/name``; other files in such a folder are removed. The tokenizer record and files of an older
                pair are removed too if none are added.
            resume: result of `save` of an interrupted writer to continue, or zeros for a new one that can be
                interrupted. None for one whose unfinished files are removed.
            origins: names of the input files, for the numbers in `add_origins`. None writes no ``.origins``.
            manifest: fields of the manifest that only the caller knows, among them ``counts``; they may change until
                the end. None writes no manifest.

        Raises:
            DataError: when the format does not have the type.
        """
        self._prefix = str(prefix)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        if self._dtype not in DTYPE_CODES.values():
            raise DataError(f"{self._prefix}: the format has no {self._dtype}", "uint16 | int32")
        self._extra_files = dict(extra_files or {})
        self._sequences = 0
        self._published = False
        self._resume = resume
        self._origin_names, self._manifest = origins, manifest
        # another container may have the same process id
        self._unique = f"{os.getpid()}-{secrets.token_hex(4)}" if resume is None else RESUME
        self._keep = any(resume or ())  # the temporary files, after an exception
        self.num_documents = 0
        self.num_tokens = 0

    def __enter__(self) -> Self:
        """Create the temporary files, or continue those of an interrupted writer.

        Raises:
            OSError: when the folder cannot be written.
            DataError: when another process is writing them, or they do not hold what is to be continued.
        """
        folder = Path(self._prefix).parent
        with ExitStack() as files:
            if self._resume is None:
                # the index tables grow in unnamed files, which vanish with the process
                self._lengths: IO[bytes] = files.enter_context(tempfile.TemporaryFile(dir=folder))
                self._boundaries: IO[bytes] = files.enter_context(tempfile.TemporaryFile(dir=folder))
                self._runs: IO[bytes] = files.enter_context(tempfile.TemporaryFile(dir=folder))
                self._checksums: IO[bytes] = files.enter_context(tempfile.TemporaryFile(dir=folder))
                self._origins = OriginsWriter(self._runs)
                self._bin: IO[bytes] = files.enter_context(open(self._temporary("bin"), "x+b"))
                self._flushed = FlushedFile(self._bin)
                self._ids = BlockChecksums(self._flushed, self._checksums)
                with suppress(OSError):  # where files cannot be locked, leftovers are never removed
                    try_lock(self._bin)
            else:
                ids, final = self._temporary("bin"), self._path("bin")
                size = self._resume[2] * self._dtype.itemsize
                if self._keep and not ids.exists() and final.is_file() and final.stat().st_size == size:
                    ids = final  # the writer was ended while it published its files
                self._bin = files.enter_context(open(ids, "a+b"))
                if try_lock(self._bin) is LockState.HELD:
                    raise DataError(f"{ids}: another process is writing it", "wait until it has ended")
                if ids is final:
                    self._path("idx").unlink(missing_ok=True)
                    os.rename(final, self._temporary("bin"))
                self._lengths = files.enter_context(open(self._temporary("lengths"), "a+b"))
                self._boundaries = files.enter_context(open(self._temporary("boundaries"), "a+b"))
                self._runs = files.enter_context(open(self._temporary("runs"), "a+b"))
                self._checksums = files.enter_context(open(self._temporary("checksums"), "a+b"))
                self._continue_from(*self._resume)
            self._open = files.pop_all()
        return self

    def _continue_from(self, sequences: int, documents: int, tokens: int, runs: int) -> None:
        """Cut what was written to the files of an interrupted writer after its last `save`."""
        self._sequences, self.num_documents, self.num_tokens = sequences, documents, tokens
        id_bytes = tokens * self._dtype.itemsize
        sizes = (id_bytes, 4 * sequences, 8 * documents, runs * RUN.itemsize, id_bytes // BLOCK_BYTES * DIGEST_BYTES)
        for file, size in zip(self._saved_files, sizes):
            if os.fstat(file.fileno()).st_size < size:
                folder = shlex.quote(os.path.dirname(self._prefix) or ".")
                fix = f"start over, without what interrupted runs have left there: rm {folder}/*.{RESUME}.part"
                raise DataError(f"{file.name} is shorter than it was", fix)
            file.truncate(size)
        self._origins = OriginsWriter(self._runs, runs)
        self._flushed = FlushedFile(self._bin)
        self._ids = BlockChecksums(self._flushed, self._checksums)
        self._ids.resume(self._bin, id_bytes)

    @property
    def _saved_files(self) -> tuple[IO[bytes], ...]:
        """Open files, as in `RESUME_SUFFIXES`."""
        return self._bin, self._lengths, self._boundaries, self._runs, self._checksums

    def save(self) -> tuple[int, int, int, int]:
        """Flush everything to disk, and return what a new writer needs to continue after the documents so far."""
        self._flushed.wait()
        for file in self._saved_files:
            sync_file(file)
        self._keep = True
        return self._sequences, self.num_documents, self.num_tokens, self._origins.count

    def add_document(self, tokens: ArrayLike) -> None:
        """Append a document of one sequence of ids ``[n]``, or an empty one when ``n`` is 0."""
        ids = np.asarray(tokens)
        self.add_documents(ids, np.array([ids.size]))

    def add_documents(
        self, ids: NDArray[Any], lengths: NDArray[np.integer[Any]], counts: NDArray[np.int64] | None = None
    ) -> None:
        """Append ``n`` documents: ``ids [total]`` back to back, ``lengths [n]`` tokens of each (0: empty).

        If they have several sequences each, ``counts [n]`` are their numbers, and lengths those of all sequences.

        Raises:
            DataError: when an id does not fit the file's type, or a document is too long for the format.
            ValueError: when the lengths are negative or do not sum to ``total``.
        """
        if lengths.size and lengths.min() < 0:
            raise ValueError(f"{self._prefix}: a document of {lengths.min()} tokens")
        if lengths.size and lengths.max() > MAX_SEQUENCE_LENGTH:
            seen = f"{self._prefix}: a sequence of {lengths.max()} tokens; at most {MAX_SEQUENCE_LENGTH}"
            raise DataError(seen, "cut the document")
        if lengths.sum(dtype=np.int64) != ids.size:
            raise ValueError(f"{self._prefix}: lengths sum to {lengths.sum()}, but there are {ids.size} ids")
        stored = ids
        if not np.can_cast(ids.dtype, self._dtype, "safe"):
            with np.errstate(all="ignore"):
                stored = ids.astype(self._dtype)
            changed = ids[(stored != ids) & (ids == ids)]  # NaN differs from itself
            if changed.size:
                raise DataError(f"{self._prefix}: {changed[0]} does not fit {self._dtype}")
        self._ids.write(np.ascontiguousarray(stored, dtype=self._dtype).data)
        self._add_boundaries(self._sequences + sequences_before_ends(lengths, counts))
        self._add_lengths(lengths[lengths > 0])

    def add_origins(self, runs: NDArray[Any]) -> None:
        """Add the runs of origins of the documents that are appended next, whose numbers begin at 0."""
        self._origins.add(runs, self.num_documents)

    def add_pair(
        self,
        data: IndexedDataset,
        report: Callable[[int], None] = lambda _: None,
        manifest: DatasetManifest | None = None,
    ) -> None:
        """Append all documents of another pair of the same id type, copying its bytes.

        ``report`` is called with the size in bytes of every block copied.

        Raises:
            DataError: when the files of the pair are not those of its ``manifest``.
        """
        if manifest is not None:
            manifest.check_files(local_prefix(data.prefix), omit=("bin",))
        for first in range(1, len(data.documents), TABLE_BLOCK):
            self._add_boundaries(data.documents[first : first + TABLE_BLOCK] + self._sequences)
        for first in range(0, len(data), TABLE_BLOCK):
            self._add_lengths(data.lengths[first : first + TABLE_BLOCK])
        copy = BlockChecksums(self._ids)
        for block in data.blocks(COPY_BYTES):
            copy.write(block)
            report(len(block))
        if copy.num_bytes != data.tokens.nbytes:
            raise DataError(
                f"{data.prefix}.bin: {copy.num_bytes} bytes were read, expected {data.tokens.nbytes}",
                "merge again after all writers have finished",
            )
        if manifest is not None:
            manifest.files["bin"].compare(copy.finish(), f"{data.prefix}.bin")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._published:
                publish_all([self])
        finally:
            with suppress(OSError):  # raised before, or another exception matters more
                self._flushed.wait()
            kept = RESUME_SUFFIXES if self._keep and not self._published else ()
            for suffix in {"idx", *self._made, *RESUME_SUFFIXES, *self._extra_files}.difference(kept):
                self._temporary(suffix).unlink(missing_ok=True)
            for folder in self._folders():
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
            self._open.close()  # last, because on a full disk it raises again

    def _prepare(self) -> None:
        """Write and sync everything, so that only renames are left."""
        targets = [self._path(suffix) for suffix in ("bin", "idx", *self._made, *self._extra_files)]
        targets += [path for folder in self._folders() if folder.is_dir() for path in folder.iterdir()]
        for path in targets:
            if path.is_dir():
                raise DataError(
                    f"{path} is a folder, but a file must be written there", f"rm -r {shlex.quote(str(path))}"
                )
        self._flushed.wait()
        sync_file(self._bin)
        for folder in self._folders():
            folder.mkdir(exist_ok=True)
        for suffix, content in self._extra_files.items():
            self._temporary(suffix).unlink(missing_ok=True)  # of a writer that was ended here
            write_file(self._temporary(suffix), content)
        with open(self._temporary("idx"), "wb") as file:
            files = {"bin": self._ids.finish(), "idx": self._write_index(BlockChecksums(file))}
            sync_file(file)
        if self._origin_names is not None:
            with open(self._temporary(ORIGINS_SUFFIX), "wb") as file:
                origins = BlockChecksums(file)
                self._origins.write(origins, self.num_documents, self._origin_names)
                files[ORIGINS_SUFFIX] = origins.finish()
                sync_file(file)
        if self._manifest is not None:
            counts = {"documents": self.num_documents, "sequences": self._sequences, "tokens": self.num_tokens}
            facts = {name: value for name, value in self._manifest.items() if name != "counts"}
            manifest = DatasetManifest(files, self._fingerprint(), self._manifest.get("counts", {}) | counts, facts)
            self._temporary(MANIFEST_SUFFIX).unlink(missing_ok=True)
            write_file(self._temporary(MANIFEST_SUFFIX), manifest.to_bytes())

    def _fingerprint(self) -> str:
        """Return `IndexedDataset.fingerprint` of the pair."""
        index: NDArray[np.uint8] = np.memmap(self._temporary("idx"), np.uint8, "r")
        lengths = index[INDEX_HEADER.size :][: 4 * self._sequences].view("<i4")
        documents = index[len(index) - 8 * (self.num_documents + 1) :].view("<i8")
        ids = np.memmap(self._bin, self._dtype, "r", shape=(self.num_tokens,)) if self.num_tokens else lengths[:0]
        return compute_fingerprint(self._dtype, lengths, documents, ids)

    def _write_index(self, file: BlockChecksums) -> FileChecksums:
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
        file.write(np.zeros(1, "<i8").data)
        self._boundaries.seek(0)
        shutil.copyfileobj(self._boundaries, file)
        return file.finish()

    def _publish_all_but_index(self) -> None:
        """Rename the ids and the files beside them; remove the other files of an older pair."""
        suffixes = ["bin", *self._made, *self._extra_files]
        for path in map(self._path, DATASET_SUFFIXES):
            if path in self._folders() or path in map(self._path, (*suffixes, "idx")):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for suffix in suffixes:
            os.rename(self._temporary(suffix), self._path(suffix))
        for folder in self._folders():
            for old in {*folder.iterdir()} - {*map(self._path, self._extra_files)}:
                old.unlink()
            sync_folder(folder)

    def _publish_index(self) -> None:
        durable_rename(self._temporary("idx"), self._path("idx"))
        self._published = True

    @property
    def _made(self) -> list[str]:
        """Suffixes of the files about the pair that are written at the end."""
        made = {ORIGINS_SUFFIX: self._origin_names, MANIFEST_SUFFIX: self._manifest}
        return [suffix for suffix, content in made.items() if content is not None]

    def _path(self, suffix: str) -> Path:
        return Path(f"{self._prefix}.{suffix}")

    def _temporary(self, suffix: str) -> Path:
        return Path(f"{self._prefix}.{suffix}.{self._unique}.part")

    def _folders(self) -> set[Path]:
        """Return the folders of the added files."""
        return {self._path(suffix).parent for suffix in self._extra_files if "/" in suffix}

    def _add_lengths(self, lengths: NDArray[np.integer[Any]]) -> None:
        self._lengths.write(np.ascontiguousarray(lengths, dtype="<i4").data)
        self._sequences += len(lengths)
        self.num_tokens += int(lengths.sum(dtype=np.int64))

    def _add_boundaries(self, boundaries: NDArray[np.integer[Any]]) -> None:
        """Append ``boundaries [n]``: sequences before the end of each of ``n`` documents."""
        self._boundaries.write(np.ascontiguousarray(boundaries, dtype="<i8").data)
        self.num_documents += len(boundaries)


def publish_all(writers: Sequence[IndexedDatasetWriter]) -> None:
    """Publish the files of several writers at once, before their ``with`` blocks end.

    Everything that can fail for lack of space or permission is done for all of them first and leaves older pairs
    intact. While files are renamed no pair has an index, so that an old one is never read beside a new one.

    Raises:
        DataError: when a folder is in the place of a file.
        OSError: when the disk refuses.
    """
    for writer in writers:
        writer._prepare()
    for writer in writers:
        writer._path("idx").unlink(missing_ok=True)  # an older index must not outlive its ids
    for writer in writers:
        writer._publish_all_but_index()
    for writer in writers:
        writer._publish_index()


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
            for path in map(Path, sorted(glob.glob(f"{glob.escape(str(prefix))}.*.{writer}.part"), reverse=True)):
                path.unlink()
                removed.append(path)
    return removed


def check_not_existing(prefixes: Iterable[str], overwrite: bool) -> None:
    """Refuse prefixes that already have files, unless ``overwrite``."""
    paths = [f"{prefix}.{suffix}" for prefix in prefixes for suffix in DATASET_SUFFIXES]
    found = [path for path in paths if os.path.lexists(path)]
    if found and not overwrite:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise DataError(f"{found[0]} is there already{more}", "--overwrite", "another --output-prefix")


@dataclass(frozen=True)
class MergeInput:
    """One pair to merge."""

    prefix: str
    dtype: np.dtype[Any]
    documents: int
    sequences: int
    tokens: int
    record: TokenizerRecord | None

    @classmethod
    def of(cls, prefix: str) -> MergeInput:
        """Open a pair, check everything but its ids, and close it again: thousands may be merged.

        Raises:
            DataError: when the pair or its record is missing or damaged.
        """
        data = IndexedDataset(prefix, floats=True)
        record = read_tokenizer_record(prefix)
        return cls(prefix, data.dtype, data.num_documents, len(data), data.num_tokens, record)

    @property
    def num_bytes(self) -> int:
        """Size of ``.bin``."""
        return self.tokens * self.dtype.itemsize


def find_prefixes(inputs: Sequence[str]) -> list[str]:
    """Return the pairs to merge: of a folder all pairs in it, by name; anything else is itself a prefix."""
    prefixes: dict[str, str] = {}
    for path in inputs:
        for prefix in _prefixes_in(Path(path)) if _is_folder(path) else [path]:
            ids = prefix if is_remote(prefix) else os.path.realpath(f"{prefix}.bin")
            if ids in prefixes:
                other = f", also as {prefixes[ids]}" if prefixes[ids] != prefix else ""
                raise DataError(
                    f"{prefix} is named twice{other}; to read a corpus more often, give it a weight",
                    f"pretrain_gpt.py --data-path 2 {prefix} 1 OTHER",
                )
            prefixes[ids] = prefix
    return list(prefixes.values())


def _is_folder(path: str) -> bool:
    """Return True for a folder of pairs. Megatron-LM's cache folder has the name of its pair, which then is meant."""
    return os.path.isdir(path) and not os.path.isfile(f"{path}.idx")


def _prefixes_in(folder: Path) -> list[str]:
    unfinished = sorted(folder.glob("*.part"))
    if unfinished:
        raise DataError(
            f"{unfinished[0]}: another process is writing it, or was killed while writing",
            f"wait, or repeat its command | rm {shlex.quote(str(folder))}/*.part",
        )
    prefixes = sorted({str(path.with_suffix("")) for path in folder.iterdir() if path.suffix in (".bin", ".idx")})
    if not prefixes:
        raise DataError(f"{folder} holds no .bin and .idx", "--input FOLDER_OF_PAIRS | --input PREFIX PREFIX ...")
    return prefixes


def check_compatible(parts: Sequence[MergeInput]) -> None:
    """Check that ids mean the same in all parts."""
    for a, b in pairwise(parts):
        if a.dtype != b.dtype:
            raise DataError(
                f"{a.prefix} holds {a.dtype}, {b.prefix} {b.dtype}: one pair has one type",
                "preprocess both with the same tokenizer",
                f"leave them apart: pretrain_gpt.py --data-path {a.prefix} {b.prefix}",
            )
        if a.record is None and b.record is None:
            continue
        if a.record is None or b.record is None:
            known, unknown = (b, a) if a.record is None else (a, b)
            recorded, unrecorded = f"{known.prefix}.{RECORD_SUFFIX}", f"{unknown.prefix}.{RECORD_SUFFIX}"
            raise DataError(
                f"{recorded} names the tokenizer of {known.prefix}, but {unknown.prefix} has no such record",
                f"if it was the same one: cp {shlex.quote(recorded)} {shlex.quote(unrecorded)}",
            )
        first, second = vars(a.record), vars(b.record)
        names = {"pad", "special_ids"} if have_same_ids(a.prefix, b.prefix) else {*first}
        if None in (first["special_ids"], second["special_ids"]):  # older records lack these fields
            names -= {"pad", "special_ids", "settings"}
        for name in first:
            if name in names and first[name] != second[name]:
                raise DataError(
                    f"{a.prefix} and {b.prefix} were written with different tokenizers: "
                    f"{name} is {first[name]!s:.60} and {second[name]!s:.60}",
                    "preprocess both with the same tokenizer",
                )


def check_output(inputs: Sequence[str], parts: Sequence[MergeInput], output: str) -> None:
    """Check that the merged pair can be written beside its parts."""
    if not os.path.basename(output):
        raise DataError(f"--output-prefix {output} is a folder", f"--output-prefix {output}merged")
    folder = os.path.realpath(os.path.dirname(output) or ".")
    for part in parts:
        if os.path.realpath(f"{output}.bin") == os.path.realpath(f"{part.prefix}.bin"):
            raise DataError(f"--output-prefix {output} is one of the pairs to merge", "another --output-prefix")
    for path in inputs:
        if _is_folder(path) and os.path.realpath(path) == folder:
            raise DataError(
                f"--output-prefix {output} lies in {path}, whose pairs are merged: the next merge would include it",
                f"--output-prefix {os.path.join(os.path.dirname(folder), os.path.basename(output))}",
            )
    os.makedirs(folder, exist_ok=True)
    needed = sum(part.num_bytes + 2 * INDEX_ENTRY_BYTES * max(part.sequences, part.documents) for part in parts)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(f"{needed:,} bytes are needed in {folder}, which has {free:,} free", "another --output-prefix")


def in_shard_order(parts: Sequence[MergeInput]) -> tuple[list[MergeInput], str | None]:
    """Return the parts in the order of their shards if all are shards of one corpus, and a note if some are missing.

    Raises:
        DataError: when a shard is there twice, or shards are of different corpora or were written with other options.
    """
    manifests = [DatasetManifest.read(local_prefix(part.prefix)) for part in parts]
    shards = [manifest.facts.get("shard") if manifest else None for manifest in manifests]
    known = [(number, of) for number, of in filter(None, shards)]
    if len(known) < len(parts) or len({of for _, of in known}) > 1:
        return list(parts), None
    facts = [manifest.facts for manifest in manifests if manifest]
    for field in SHARED_BY_SHARDS:
        for (a, of_a), (b, of_b) in pairwise(zip(parts, facts)):
            if of_a.get(field) != of_b.get(field):
                seen = f"{a.prefix} and {b.prefix} are not shards of the same corpus, preprocessed in the same way"
                differs = f"{field} is {of_a.get(field)!s:.80} and {of_b.get(field)!s:.80}"
                raise DataError(f"{seen}: {differs}", "preprocess all shards again, from the same input")
    by_number: dict[int, MergeInput] = {}
    for (number, of), part in zip(known, parts):
        if (other := by_number.setdefault(number, part)) is not part:
            raise DataError(f"{other.prefix} and {part.prefix} are both shard {number}/{of}", f"rm {part.prefix}.*")
    missing = sorted({*range(known[0][1])} - {*by_number})
    note = f"of {known[0][1]} shards, these are not there: {listed(missing, 8)}" if missing else None
    return [by_number[number] for number in sorted(by_number)], note


def merge_datasets(parts: Sequence[MergeInput], output: str, report: Callable[[int], None] = lambda _: None) -> None:
    """Write the pair ``output``, with the tokenizer record and files of the part with the most complete record.

    The parts have passed `check_compatible`. ``report`` is called with the size in bytes of every block copied.

    Raises:
        DataError: when a part has changed since it was checked.
        OSError: when the disk refuses; nothing is left behind then.
    """
    remove_unfinished_files(output)
    extra_files = {}
    recorded = [(part.record, part.prefix) for part in parts if part.record is not None]
    if recorded:
        _, prefix = max(recorded, key=lambda pair: (pair[0].special_ids is not None, pair[0].parses_special_tokens))
        extra_files[RECORD_SUFFIX] = read_small(f"{local_prefix(prefix)}.{RECORD_SUFFIX}")
        folder = Path(f"{local_prefix(prefix)}.{FILES_SUFFIX}")
        if folder.is_dir():
            refuse_outside_links(folder, COPY_FILES_FIX)
        for path in sorted(folder.glob("*")):
            if path.is_file():
                extra_files[f"{FILES_SUFFIX}/{path.name}"] = read_tokenizer_file(path)
    names: dict[str, int] = {}  # of the input files, and their numbers
    origins = [DocumentOrigins.open(part.prefix, part.documents) for part in parts]
    for of_part in origins:
        for name in of_part.files if of_part else ():
            names.setdefault(name, len(names))
    manifests = [DatasetManifest.read(local_prefix(part.prefix)) for part in parts]
    manifest = merge_fields(manifests)
    with IndexedDatasetWriter(output, parts[0].dtype, extra_files, None, list(names) or None, manifest) as writer:
        for part, of_part, checksums in zip(parts, origins, manifests):
            data = IndexedDataset(part.prefix, floats=True)
            if (data.dtype, data.num_tokens, len(data)) != (part.dtype, part.tokens, part.sequences):
                raise DataError(
                    f"{part.prefix} has changed since the merge began", "merge again after all writers have finished"
                )
            writer.add_origins(_renumbered(of_part, names) if of_part else np.array([(0, 0, UNKNOWN_FILE)], RUN))
            writer.add_pair(data, report, checksums)


def _renumbered(origins: DocumentOrigins, names: Mapping[str, int]) -> NDArray[Any]:
    """Return the runs of a pair with the numbers of its files in the merged pair."""
    numbers = np.array([*(names[name] for name in origins.files), UNKNOWN_FILE], np.int32)
    runs = np.array(origins.runs)
    runs["file"] = numbers[runs["file"]]
    return runs
