"""Find the duplicates of a corpus in bounded memory, in phases that continue after any interruption.

1. `collect`: workers compute the keys of every document: one of its whole text, and one for each band of its MinHash
   signature. Runs of documents are sorted by key, for every band, and written.
2. `find_pairs`: for every band, the sorted runs are merged; documents with equal keys are paired with the first one.
3. `join_pairs`: the pairs become clusters, by a union-find forest in a file whose roots are first documents.
4. `write_list`: all documents but the first of each cluster become a `DropList`.

Memory does not grow with the corpus, except for the pages of two files of 8 and 4 bytes per document that phases 3 and
4 map, which the system can evict. The result does not depend on the number of workers.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.checkpoint.durable_files import LockState, checksum, publish_file, sync_file, try_lock
from megatron.config.files import parse_json, read_small
from megatron.config.text import counted
from megatron.data.errors import DataError
from megatron.data.preprocess.corpus import (
    BLOCK_BYTES,
    BadDocument,
    BadDocumentReport,
    Block,
    FileBlock,
    TextDocument,
    check_single_key,
    load_block,
    read_block,
    split_into_blocks,
)
from megatron.data.preprocess.drop_list import LIST_NAME, ROW, ROWS_NAME, ListedFile, publish_drop_list
from megatron.data.preprocess.files import MAX_LINE_BYTES
from megatron.data.preprocess.minhash import NO_KEY, MinHash, MinHashOptions, exact_key
from megatron.data.preprocess.remote import InputFile
from megatron.data.preprocess.workers import WorkerPool

WORK_NAME = "work.part"  # folder of the unfinished work
MAX_DESCRIBED = 20  # bad documents of a block described; the others are only counted
RUN_SECONDS = 60.0  # after which a run is written, however few documents it has
CHUNK = 1 << 14  # documents or pairs processed at once

KEYED = np.dtype([("key", "<u8"), ("document", "<u8")])
PAIR = np.dtype([("first", "<u8"), ("document", "<u8")])
PLACE = np.dtype([("row", "<u8"), ("bytes", "<u8")])


@dataclass(frozen=True)
class DeduplicationOptions:
    """Settings of a deduplication."""

    files: Sequence[InputFile]  # read in this order
    keys: tuple[str, ...]  # JSON keys of the texts, joined by a line end
    folder: Path  # of the drop list
    minhash: MinHashOptions | None = field(default_factory=MinHashOptions)  # None for exact duplicates only
    workers: int = 1  # processes; 1 means this process
    memory: int = 512 << 20  # bytes of the tables of phases 1 to 3 in all processes
    skip_bad: bool = False  # skip invalid documents instead of failing
    block_bytes: int = BLOCK_BYTES  # of text that a worker reads at once
    max_line_bytes: int = MAX_LINE_BYTES

    @property
    def bands(self) -> int:
        """Number of keys of a document; the first one is that of the whole text."""
        return 1 + (self.minhash.bands if self.minhash else 0)

    @property
    def run_documents(self) -> int:
        """Documents whose keys are sorted at once."""
        return max(1, self.memory // (self.bands * 8 + 4 * KEYED.itemsize))


class KeyedBlock(NamedTuple):
    """Keys of the documents of a block, and statistics."""

    keys: NDArray[np.uint64]  # [documents, bands]
    places: NDArray[Any]  # PLACE [documents], rows counted within the block
    files: int  # plain files read, a document each; 0 for a block of lines
    lines: int
    documents: int
    bad: int
    described: tuple[BadDocument, ...]


class BlockHasher:
    """Compute the keys of the documents of a block."""

    def __init__(self, options: DeduplicationOptions) -> None:
        self._options = options
        self._minhash = MinHash(options.minhash) if options.minhash else None

    def __call__(self, block: Block) -> KeyedBlock:
        """Return the keys of a block's documents."""
        block, lines = load_block(block)
        keys: list[list[int]] = []
        places: list[tuple[int, int]] = []
        bad: list[BadDocument] = []
        for document in read_block(block, self._options.keys):
            if isinstance(document, TextDocument):
                text = _joined(document)
                keys.append([exact_key(text), *(self._minhash.band_keys(text) if self._minhash else ())])
                places.append((document.place[1], len(text.encode())))
            elif isinstance(document, BadDocument):
                bad.append(document)
                if isinstance(block, FileBlock):  # every file has a place, so that files are counted by documents
                    keys.append([NO_KEY] * self._options.bands)
                    places.append((0, 0))
        return KeyedBlock(
            np.array(keys, np.uint64).reshape(-1, self._options.bands),
            np.array(places, PLACE),
            len(block.files) if isinstance(block, FileBlock) else 0,
            lines,
            len(keys),
            len(bad),
            tuple(bad[:MAX_DESCRIBED]),
        )


def _joined(document: TextDocument) -> str:
    return "\n".join(text.decode() if isinstance(text, bytes) else text for text in document.texts)


@dataclass
class WorkState:
    """Position of an unfinished deduplication, saved in its folder."""

    settings: dict[str, str]  # everything the result depends on
    files: int = 0  # read completely
    blocks: int = 0  # read of the next file
    file_documents: list[int] = field(default_factory=list)  # of each file read, also of the next one if it is begun
    runs: int = 0  # sorted runs written for each band
    documents: int = 0
    bad: tuple[int, int, int] = (0, 0, 0)  # counts of `BadDocumentReport`
    collected: bool = False

    def add(self, block: Block, result: KeyedBlock) -> None:
        """Move the position behind a block."""
        if isinstance(block, FileBlock):
            self.file_documents += [1] * result.files
            self.files += result.files
            return
        if block.first:
            self.file_documents.append(0)
        self.file_documents[-1] += result.documents
        self.files, self.blocks = (self.files + 1, 0) if block.last else (self.files, self.blocks + 1)


class Deduplication:
    """Work of one command in its folder."""

    def __init__(self, options: DeduplicationOptions, message: Callable[[str], object]) -> None:
        """Open the folder, and continue what an interrupted command with the same settings left there.

        Raises:
            DataError: if the settings were others, or another process works there.
        """
        for file in options.files:
            check_single_key(file, options.keys)
        self._options = options
        self._message = message
        self._work = options.folder / WORK_NAME
        self._work.mkdir(parents=True, exist_ok=True)
        self._stats = [file.stat() for file in options.files]
        with ExitStack() as stack:
            lock = stack.enter_context(open(self._work / "lock", "ab"))
            if try_lock(lock) is LockState.HELD:
                raise DataError(f"{self._work}: another process is writing it", "wait until it has ended")
            if (options.folder / LIST_NAME).exists():  # completed by a process that has just ended
                raise DataError(f"{options.folder} holds a list already", "another --output")
            self._state = self._continue()
            self._lock = stack.pop_all()

    def _continue(self) -> WorkState:
        """Return the state of an interrupted command with the same settings, or that of a new one."""
        settings = self._settings()
        try:
            state = WorkState(**parse_json(read_small(self._state_path)))
        except FileNotFoundError:
            state = WorkState(settings)
        except (ValueError, TypeError) as error:
            raise DataError(f"{self._state_path} is damaged", f"start over: rm -r {self._quoted}") from error
        other = [name for name in settings if settings[name] != state.settings.get(name)]
        if other:
            seen = f"{self._work}: an interrupted command had other {', '.join(other)}"
            raise DataError(seen, "the same command as before", f"start over: rm -r {self._quoted}")
        if state.documents:
            self._message(f"continuing an interrupted command after {state.documents:,} documents")
        return state

    @property
    def _state_path(self) -> Path:
        return self._work / "state.json"

    @property
    def _quoted(self) -> str:
        return shlex.quote(str(self._work))

    def _settings(self) -> dict[str, str]:
        options = self._options
        files = [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in zip(options.files, self._stats)]
        return {
            "--input": checksum(repr(files).encode()),
            "--json-keys": json.dumps(options.keys),
            "--method, --ngram, --bands, --rows or --seed": repr(options.minhash),
            "--max-line-bytes": str(options.max_line_bytes),
            "--on-bad-line": str(options.skip_bad),
            "versions": f"xxhash {version('xxhash')}, blocks of {options.block_bytes}",
        }

    def run(self, progress: Callable[[int], None], check: Callable[[], None]) -> dict[str, Any]:
        """Do all phases that are not done yet, and return the report that is written into the list.

        ``progress`` is called with bytes of the input that have been read, ``check`` while waiting. No other process
        can work in the folder until this ends.
        """
        with self._lock:
            return self._run(progress, check)

    def _run(self, progress: Callable[[int], None], check: Callable[[], None]) -> dict[str, Any]:
        if not self._state.collected:
            self._collect(progress, check)
        for file, old in zip(self._options.files, self._stats):
            new = file.stat()
            if (new.st_size, new.st_mtime_ns) != (old.st_size, old.st_mtime_ns):
                raise DataError(f"{file} was changed while it was read", "rerun when no process is writing it")
        self._message(f"comparing {counted(self._state.documents, 'document')} in {self._options.bands} bands")
        self._find_pairs(check)
        self._message("joining pairs")
        exact, parents = self._join_pairs(check)
        report = self._write_list(exact, parents)
        shutil.rmtree(self._work)
        return report

    # --- phase 1 ---

    def _collect(self, progress: Callable[[int], None], check: Callable[[], None]) -> None:
        options, state = self._options, self._state
        files = options.files[state.files :]
        blocks = islice(
            split_into_blocks(files, options.keys, options.block_bytes, options.max_line_bytes), state.blocks, None
        )
        report = BadDocumentReport(options.skip_bad, self._message, state.bad)
        with ExitStack() as stack:
            places = stack.enter_context(open(self._work / "places", "ab"))
            places.truncate(state.documents * PLACE.itemsize)
            results = stack.enter_context(closing(self._answers(BlockHasher, blocks, check)))
            pending: list[NDArray[np.uint64]] = []
            held, next_run = 0, time.monotonic() + RUN_SECONDS

            def write_run() -> None:
                sync_file(places)
                self._write_run(pending)
                state.documents, state.runs, state.bad = state.documents + held, state.runs + 1, report.counts
                publish_file(self._state_path, json.dumps(asdict(state)).encode())

            for block, result in results:
                check()
                rows = result.places
                if not isinstance(block, FileBlock):
                    rows["row"] += np.uint64(report.lines_before(block))
                report.add(block, result.lines, result.documents + result.bad, result.described, result.bad)
                places.write(rows.tobytes())
                pending.append(result.keys)
                held += len(result.keys)
                state.add(block, result)
                progress(block.stored)
                if held >= options.run_documents or time.monotonic() >= next_run:
                    write_run()
                    pending, held, next_run = [], 0, time.monotonic() + RUN_SECONDS
            state.collected = True
            write_run()

    def _answers(self, start: Callable[..., Any], requests: Iterable[Any], check: Callable[[], None]) -> Generator[Any]:
        """Yield requests with their answers, from the workers if there are several."""
        if self._options.workers == 1:
            serve = start(self._options)
            yield from ((request, serve(request)) for request in requests)
            return
        with closing(WorkerPool[Any, Any](self._options.workers, start, self._options)) as pool:
            yield from pool.results(requests, check)

    def _write_run(self, blocks: Sequence[NDArray[np.uint64]]) -> None:
        for band in range(self._options.bands):
            keys = np.concatenate([block[:, band] for block in blocks]) if blocks else np.empty(0, np.uint64)
            order = np.argsort(keys, kind="stable")
            records = np.empty(len(order), KEYED)
            records["key"], records["document"] = keys[order], order
            records["document"] += np.uint64(self._state.documents)
            path = run_path(self._work, band, self._state.runs)
            path.parent.mkdir(exist_ok=True)
            with open(path, "wb") as file:
                file.write(records[records["key"] != NO_KEY].tobytes())
                sync_file(file)

    # --- phases 2 to 4 ---

    def _find_pairs(self, check: Callable[[], None]) -> None:
        missing = [band for band in range(self._options.bands) if not pairs_path(self._work, band).exists()]
        requests = [(band, self._state.runs) for band in missing]
        with closing(self._answers(PairFinder, requests, check)) as answers:
            for _ in answers:
                check()

    def _join_pairs(self, check: Callable[[], None]) -> tuple[int, NDArray[np.uint64]]:
        """Return the number of exact duplicates, and for each document an earlier one of its cluster, or itself."""
        parents = np.memmap(self._work / "parents", np.uint64, "w+", shape=(self._state.documents,))
        for first in range(0, len(parents), CHUNK):
            parents[first : first + CHUNK] = np.arange(first, min(first + CHUNK, len(parents)), dtype=np.uint64)
        exact = 0
        for band in range(self._options.bands):
            path = pairs_path(self._work, band)
            for first in range(0, path.stat().st_size, CHUNK * PAIR.itemsize):
                check()
                pairs = np.fromfile(path, PAIR, CHUNK, offset=first)
                exact += len(pairs) if band == 0 else 0
                join(parents, pairs["first"], pairs["document"])
        return exact, parents

    def _write_list(self, exact: int, parents: NDArray[np.uint64]) -> dict[str, Any]:
        options, state = self._options, self._state
        places = np.memmap(self._work / "places", PLACE, "r", shape=(state.documents,))
        sizes = np.memmap(self._work / "sizes", np.uint32, "w+", shape=(state.documents,))
        files, start, text_bytes, dropped_bytes = [], 0, 0, 0
        with open(options.folder / ROWS_NAME, "wb") as rows:
            for path, stat, documents in zip(options.files, self._stats, state.file_documents):
                dropped = 0
                for first in range(start, start + documents, CHUNK):
                    chunk = np.arange(first, min(first + CHUNK, start + documents), dtype=np.uint64)
                    roots = find_roots(parents, chunk)
                    is_dropped = roots != chunk
                    np.add.at(sizes, roots, 1)
                    found = places[first : first + len(chunk)]
                    text_bytes += int(found["bytes"].sum())
                    dropped_bytes += int(found["bytes"][is_dropped].sum())
                    rows.write(found["row"][is_dropped].astype(ROW).tobytes())
                    dropped += int(is_dropped.sum())
                files.append(ListedFile(str(path), stat.st_size, documents, dropped))
                start += documents
            sync_file(rows)
        counts: dict[int, int] = {}
        for first in range(0, len(sizes), CHUNK):
            for size, count in zip(*np.unique(sizes[first : first + CHUNK], return_counts=True)):
                counts[int(size)] = counts.get(int(size), 0) + int(count)
        dropped = sum(file.dropped for file in files)
        report = {
            "program": "deduplicate.py",
            "minhash": asdict(options.minhash) if options.minhash else None,
            "documents": state.documents,
            "dropped": dropped,
            "exact duplicates": exact,
            "near duplicates": dropped - exact,
            "text bytes": text_bytes,
            "dropped bytes": dropped_bytes,
            "bad documents": state.bad[0],
            "clusters by size": {size: count for size, count in sorted(counts.items()) if size > 1},
        }
        publish_drop_list(options.folder, files, report)
        return report


def run_path(work: Path, band: int, run: int) -> Path:
    """Return the file of a sorted run of a band."""
    return work / f"band-{band:03d}" / f"run-{run:06d}"


def pairs_path(work: Path, band: int) -> Path:
    """Return the file of the pairs of a band."""
    return work / f"pairs-{band:03d}"


class PairFinder:
    """Merge the runs of a band and write its pairs."""

    def __init__(self, options: DeduplicationOptions) -> None:
        self._work = options.folder / WORK_NAME
        self._records = options.memory // options.workers // (6 * KEYED.itemsize)

    def __call__(self, request: tuple[int, int]) -> int:
        """Write the pairs of a band that has this number of runs, remove the runs, and return the number of pairs."""
        band, runs = request
        target, count = pairs_path(self._work, band), 0
        unfinished = target.with_suffix(".unfinished")
        paths = [run_path(self._work, band, run) for run in range(runs)]
        with open(unfinished, "wb") as file:
            for pairs in equal_keys(merge_runs(paths, self._records)):
                file.write(pairs.tobytes())
                count += len(pairs)
            sync_file(file)
        unfinished.rename(target)
        shutil.rmtree(paths[0].parent)
        return count


def merge_runs(paths: Sequence[Path], records: int) -> Iterator[NDArray[Any]]:
    """Yield the KEYED records of sorted runs in the order of their keys.

    Of equal keys, the first record is that of the first run that has one. About ``records`` are held at once, but at
    least one of each run.
    """
    ahead = max(1, records // len(paths))
    offsets = [0] * len(paths)
    buffers = [np.empty(0, KEYED)] * len(paths)
    while True:
        for number, path in enumerate(paths):
            if not len(buffers[number]) and offsets[number] >= 0:
                buffers[number] = np.fromfile(path, KEYED, ahead, offset=offsets[number])
                read = len(buffers[number]) * KEYED.itemsize
                offsets[number] = offsets[number] + read if read else -1
        held = [buffer for buffer in buffers if len(buffer)]
        if not held:
            return
        bound = min(buffer["key"][-1] for buffer in held)
        parts = []
        for number, buffer in enumerate(buffers):
            end = int(np.searchsorted(buffer["key"], bound, "right"))
            parts.append(buffer[:end])
            buffers[number] = buffer[end:]
        merged = np.concatenate(parts)
        yield merged[np.argsort(merged["key"], kind="stable")]


def equal_keys(chunks: Iterable[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """Yield PAIR arrays: every record of sorted chunks whose key is that of an earlier record, with the first such one.

    The first record of a key has its lowest document.
    """
    last = np.empty(0, KEYED)  # the first record with the last key
    for chunk in chunks:
        records = np.concatenate([last, chunk])
        starts = np.ones(len(records), np.bool_)
        starts[1:] = records["key"][1:] != records["key"][:-1]
        first = np.maximum.accumulate(np.where(starts, np.arange(len(records)), 0))
        pairs = np.empty(int((~starts).sum()), PAIR)
        pairs["first"], pairs["document"] = records["document"][first[~starts]], records["document"][~starts]
        yield pairs
        last = records[first[-1:]]


def find_roots(parents: NDArray[np.uint64], documents: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the roots of documents ``[n]`` in a forest, and shorten their paths to them."""
    roots = parents[documents]
    while True:
        above = parents[roots]
        if np.array_equal(above, roots):
            parents[documents] = roots
            return roots
        parents[documents] = roots = above


def join(parents: NDArray[np.uint64], left: NDArray[np.uint64], right: NDArray[np.uint64]) -> None:
    """Join the trees of pairs of documents ``[n]``; the root of a tree is its lowest document."""
    while True:
        a, b = find_roots(parents, left), find_roots(parents, right)
        differ = a != b
        if not differ.any():
            return
        a, b, left, right = a[differ], b[differ], left[differ], right[differ]
        np.minimum.at(parents, np.maximum(a, b), np.minimum(a, b))
