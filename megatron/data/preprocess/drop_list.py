"""Lists of documents that preprocessing leaves out, such as duplicates: a folder of two files.

``drop.json`` names the input files with their sizes, counts, and how the list was made. ``drop.rows`` holds the rows of
all documents to leave out, as little-endian uint64, ascending within each file: a line of JSON lines or a row of a
table from 1 on, 0 for a file that is one document. ``drop.json`` is written last.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.checkpoint.durable_files import checksum, publish_file
from megatron.config.files import parse_json, read_small
from megatron.data.errors import DataError
from megatron.data.manifest import MAX_BYTES
from megatron.data.preprocess.corpus import Block, FileBlock, load_block
from megatron.data.preprocess.files import is_table

LIST_FORMAT = 1
LIST_NAME, ROWS_NAME = "drop.json", "drop.rows"
DROP_LIST = "drop list"  # the reason, in counts
ROW = np.dtype("<u8")


@dataclass(frozen=True)
class ListedFile:
    """Input file of a list."""

    path: str  # as it was named
    size: int  # bytes
    documents: int
    dropped: int  # rows in the list


class DropList:
    """Documents to leave out, by file and row. The rows are read through a memory map."""

    def __init__(self, folder: Path, files: list[ListedFile], digest: str) -> None:
        self.folder = folder
        self.files = files
        self.digest = digest  # of `LIST_NAME`
        self._rows = np.memmap(folder / ROWS_NAME, ROW, "r") if self.dropped else np.empty(0, ROW)
        if len(self._rows) != self.dropped:
            raise DataError(
                f"{folder / ROWS_NAME} holds {len(self._rows):,} rows, not {self.dropped:,}", "copy it again"
            )
        ends = np.cumsum([file.dropped for file in files], dtype=np.int64).tolist()
        self._place = {file.path: (file, end - file.dropped, end) for file, end in zip(files, ends)}

    @property
    def dropped(self) -> int:
        """Number of documents in the list."""
        return sum(file.dropped for file in self.files)

    @classmethod
    def open(cls, folder: str | Path) -> DropList:
        """Open a list; raise DataError if it is missing or damaged."""
        folder = Path(folder)
        try:
            stored = read_small(folder / LIST_NAME, MAX_BYTES)
            content = parse_json(stored)
            if content["format"] != LIST_FORMAT:
                raise DataError(f"{folder / LIST_NAME} has format {content['format']}", "use the version that wrote it")
            return cls(folder, [ListedFile(**file) for file in content["files"]], checksum(stored))
        except FileNotFoundError as error:
            fix = f"python tools/deduplicate.py --input FILES --output {shlex.quote(str(folder))}"
            raise DataError(f"{folder} is not a complete drop list", fix) from error
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{folder / LIST_NAME} is damaged", "make the list again") from error

    def rows(self, path: str, size: int) -> NDArray[np.uint64]:
        """Return the rows ``[n]`` of a file to leave out, ascending; raise DataError if it is not the listed file."""
        if path not in self._place:
            raise DataError(
                f"{path} is not in the drop list {self.folder}", "the same --input as the list was made with"
            )
        file, start, end = self._place[path]
        if file.size != size:
            seen = f"{path} has {size:,} bytes, but {file.size:,} when the drop list {self.folder} was made"
            raise DataError(seen, "make the list again")
        return self._rows[start:end]


def publish_drop_list(folder: Path, files: list[ListedFile], made_by: dict[str, Any]) -> None:
    """Complete a list whose rows are written."""
    content = {"format": LIST_FORMAT, "made_by": made_by, "files": [asdict(file) for file in files]}
    publish_file(folder / LIST_NAME, json.dumps(content, indent=1).encode())


def mark_dropped(blocks: Iterable[Block], drop: DropList) -> Iterator[Block]:
    """Yield the blocks of files with the documents of a list marked as dropped."""
    rows, before = np.empty(0, ROW), 0
    for block in blocks:
        if isinstance(block, FileBlock):
            listed = (len(drop.rows(str(each), each.stat().st_size)) for each in block.files)
            yield block._replace(dropped=frozenset(number for number, count in enumerate(listed, 1) if count))
            continue
        if block.first:
            rows, before = drop.rows(str(block.file), block.file.stat().st_size), block.rows_before
        if not len(rows):
            yield block
            continue
        content = block.read()
        _, lines = load_block(block._replace(content=content))
        is_open = not is_table(block.file) and content[-1:] not in (b"\n", b"")  # the last line has no end
        first, end = np.searchsorted(rows, [before + 1, before + lines + 1 + is_open])
        yield block._replace(dropped=frozenset((rows[first:end] - before).tolist()))
        before += lines
