"""Origins of the documents of a pair of token files: ``<prefix>.origins``, input file and row of every document.

A run is a range of documents that come from consecutive rows of one file. The file holds, little-endian::

    8 bytes   DOCORIG and a zero byte
    uint64    version, 1
    uint64    D, documents of the pair
    uint64    R, runs
    R times   int64 first document, int64 row of it, int32 number of its file
    JSON      list of the files' names, in UTF-8

A row is a line of JSON lines, an element of a JSON array, or a row of a table, from 1 on; 0 for a file that is one
document. The file number -1 is unknown: the run was merged from a pair without origins.
"""

from __future__ import annotations

import json
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.files import parse_json
from megatron.data.errors import DataError
from megatron.data.manifest import ORIGINS_SUFFIX, Writable
from megatron.data.prefixes import local_prefix

ORIGINS_MAGIC = b"DOCORIG\x00"
ORIGINS_VERSION = 1
ORIGINS_HEADER = struct.Struct("<8sQQQ")
RUN = np.dtype([("document", "<i8"), ("row", "<i8"), ("file", "<i4")])  # packed, 20 bytes
UNKNOWN_FILE = -1
RUNS_PER_BLOCK = 1 << 18


@dataclass(frozen=True)
class DocumentOrigins:
    """Origins of the documents of a pair, read through a memory map."""

    documents: int  # of the pair
    runs: NDArray[Any]  # RUN [R], ascending
    files: Sequence[str]  # as they were named when the pair was written

    @classmethod
    def open(cls, prefix: str | Path, documents: int | None = None) -> DocumentOrigins | None:
        """Open ``<prefix>.origins``; None if there is no such file.

        Raises:
            DataError: if the file is damaged, or not that of a pair of so many ``documents``.
        """
        path = Path(f"{local_prefix(prefix)}.{ORIGINS_SUFFIX}")
        try:
            content = np.memmap(path, np.uint8, "r")
            magic, version, held, count = ORIGINS_HEADER.unpack(content[: ORIGINS_HEADER.size].tobytes())
            end = ORIGINS_HEADER.size + count * RUN.itemsize
            if magic != ORIGINS_MAGIC or version != ORIGINS_VERSION or end > len(content):
                raise ValueError("its header is wrong")
            if documents not in (None, held):
                raise ValueError(f"it is of {held:,} documents, the pair has {documents:,}")
            files = parse_json(content[end:].tobytes())
            if not (isinstance(files, list) and all(isinstance(name, str) for name in files)):
                raise ValueError("the names of the files are no list of texts")
            runs = content[ORIGINS_HEADER.size : end].view(RUN)
            _check_runs(runs, held, len(files))
            return cls(held, runs, files)
        except FileNotFoundError:
            return None
        except (ValueError, struct.error) as error:
            raise DataError(f"{path} is damaged: {error}", "copy it again, or remove it") from error

    def locate(self, document: int) -> tuple[str, int] | None:
        """Return the input file of a document, and its row (0 for a file that is one document); None if unknown.

        Raises:
            IndexError: if the pair has no such document.
        """
        if not 0 <= document < self.documents:
            raise IndexError(f"document {document} of {self.documents}")
        place = bisect_right(self.runs["document"], document) - 1
        if place < 0 or self.runs["file"][place] == UNKNOWN_FILE:
            return None
        first, row, file = self.runs[place].tolist()
        return self.files[file], row + (document - first if row else 0)


def _check_runs(runs: NDArray[Any], documents: int, files: int) -> None:
    """Raise ValueError if runs are not in the order of their documents, or of files without a name."""
    for first in range(0, len(runs), RUNS_PER_BLOCK):
        numbers = runs["file"][first : first + RUNS_PER_BLOCK]
        starts = runs["document"][max(first - 1, 0) : first + RUNS_PER_BLOCK]
        rises = starts[0] >= 0 and starts[-1] <= documents and bool((starts[1:] >= starts[:-1]).all())
        if not rises or numbers.min() < UNKNOWN_FILE or numbers.max() >= files:
            raise ValueError("its runs are wrong")


def make_runs(rows: NDArray[np.int64], files: NDArray[np.integer[Any]] | int = 0) -> NDArray[Any]:
    """Return the runs of documents with these ``rows [n]`` and numbers of ``files [n]``."""
    runs = np.zeros(len(rows), RUN)
    runs["document"], runs["row"], runs["file"] = np.arange(len(rows)), rows, files
    return runs[_starts(runs)]


def _starts(runs: NDArray[Any], before: Sequence[int] | None = None) -> NDArray[np.bool_]:
    """Return True for each run ``[n]`` that does not continue the one before it; ``before`` precedes all."""
    starts = np.ones(len(runs), np.bool_)
    shifts = runs["row"] - runs["document"]
    starts[1:] = (np.diff(shifts) != 0) | (np.diff(runs["file"]) != 0)
    if before is not None and len(runs):
        document, row, file = before
        starts[0] = (row - document, file) != (shifts[0], runs["file"][0])
    return starts


class OriginsWriter:
    """Collects runs in a temporary file, from which it writes a file of origins at the end."""

    def __init__(self, runs: IO[bytes], count: int = 0) -> None:
        """Append to ``runs``, an open file of ``count`` runs."""
        self._runs = runs
        self._last: list[int] | None = None
        self.count = count
        if count:
            runs.seek((count - 1) * RUN.itemsize)
            self._last = np.frombuffer(runs.read(RUN.itemsize), RUN)[0].tolist()
            runs.seek(0, os.SEEK_END)

    def add(self, runs: NDArray[Any], first_document: int) -> None:
        """Append runs whose documents are counted from ``first_document`` of the pair."""
        runs = runs.copy()
        runs["document"] += first_document
        runs = runs[_starts(runs, self._last)]
        if len(runs):
            self._runs.write(runs.tobytes())
            self._last = runs[-1].tolist()
            self.count += len(runs)

    def write(self, file: Writable, documents: int, names: Sequence[str]) -> None:
        """Write the file of origins of a pair with this number of documents; ``names`` are those of the files.

        Files that no document comes from are left out.
        """
        used = np.zeros(len(names) + 1, np.bool_)
        for runs in self._blocks():
            used[runs["file"]] = True  # that of UNKNOWN_FILE is the last one
        used[UNKNOWN_FILE] = False
        numbers = np.append(np.cumsum(used[:-1]) - 1, UNKNOWN_FILE)
        file.write(ORIGINS_HEADER.pack(ORIGINS_MAGIC, ORIGINS_VERSION, documents, self.count))
        for runs in self._blocks():
            runs["file"] = numbers[runs["file"]]
            file.write(runs.tobytes())
        file.write(json.dumps([names[i] for i in np.flatnonzero(used).tolist()], ensure_ascii=False).encode())

    def _blocks(self) -> Iterator[NDArray[Any]]:
        """Yield all runs, block by block."""
        self._runs.seek(0)
        while block := self._runs.read(RUNS_PER_BLOCK * RUN.itemsize):
            yield np.frombuffer(bytearray(block), RUN)
