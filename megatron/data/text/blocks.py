"""Split files into blocks that a worker encodes at once: whole JSON lines, or plain files.

The block size changes neither the documents nor their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from megatron.data.errors import DataError
from megatron.data.text.compressed import SUFFIXES, DamagedError, decompressed

JSON_LINES = (".jsonl", ".json", ".ndjson")
BLOCK_BYTES = 2 << 20
SEARCH_BYTES = 1 << 16


class Lines(NamedTuple):
    """Consecutive whole lines of a JSON-lines file."""

    file: Path
    content: bytes | range  # the lines, or the byte range of the file that holds them
    stored: int  # bytes they take in the file, compressed if it is
    first: bool  # whether the file begins with them
    last: bool  # whether the file ends with them
    trouble: str = ""  # why the rest of the file cannot be read; empty if it can

    def read(self) -> bytes:
        """Return the lines.

        Raises:
            DataError: if the file has become shorter.
        """
        if isinstance(self.content, bytes):
            return self.content
        with open(self.file, "rb") as stream:
            stream.seek(self.content.start)
            content = stream.read(len(self.content))
        if len(content) != len(self.content):
            raise DataError(f"{self.file} became shorter while it was read", "rerun when no process is writing it")
        return content


class Texts(NamedTuple):
    """Plain files, one document each."""

    files: tuple[Path, ...]
    stored: int  # total size, compressed if they are


Block = Lines | Texts


def holds_lines(file: Path) -> bool:
    """Return True if the name is that of a JSON-lines file, ignoring case and compression."""
    return unpacked_name(file).lower().endswith(JSON_LINES)


def compression(file: Path) -> str:
    """Return the suffix of the compression in lower case, or an empty string."""
    suffix = file.suffix.lower()
    return suffix if suffix in SUFFIXES else ""


def unpacked_name(file: Path) -> str:
    """Return the file name without the suffix of its compression."""
    return file.name[: len(file.name) - len(compression(file))]


def weight(block: Block) -> int:
    """Return the bytes of text in a block, as far as known before reading it."""
    return block.stored if isinstance(block, Texts) else len(block.content)


def cut(files: Sequence[Path], block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Yield blocks of about ``block_bytes`` of text in the order of the files; a longer line makes a larger block.

    Raises:
        OSError: if a file cannot be read.
    """
    plain: list[Path] = []
    size = 0
    for file in files:
        if not holds_lines(file):
            plain.append(file)
            size += file.stat().st_size
        if plain and (size >= block_bytes or holds_lines(file)):
            yield Texts(tuple(plain), size)
            plain, size = [], 0
        if holds_lines(file):
            yield from cut_lines(file, block_bytes)
    if plain:
        yield Texts(tuple(plain), size)


def cut_lines(file: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[Lines]:
    """Yield the blocks of one JSON-lines file, at least one."""
    return _cut_compressed(file, block_bytes) if compression(file) else _cut_stored(file, block_bytes)


def _cut_stored(file: Path, block_bytes: int) -> Iterator[Lines]:
    start, size = 0, file.stat().st_size
    with open(file, "rb") as stream:
        while True:
            end = _end_of_line(stream, start + block_bytes, size)
            yield Lines(file, range(start, end), end - start, first=start == 0, last=end == size)
            if end == size:
                return
            start = end


def _end_of_line(stream: IO[bytes], position: int, size: int) -> int:
    """Return the first position from ``position`` on that follows a line end, or the end of the file."""
    position -= 1
    while position < size:
        stream.seek(position)
        data = stream.read(SEARCH_BYTES)
        if not data:
            break
        if (found := data.find(b"\n")) >= 0:
            return position + found + 1
        position += len(data)
    return size


def _cut_compressed(file: Path, block_bytes: int) -> Iterator[Lines]:
    pieces: list[bytes] = []
    size = 0  # of the pieces
    block_start = 0  # in the compressed file
    first, trouble = True, ""
    with open(file, "rb") as stream:
        try:
            for piece in decompressed(file, stream):
                size += len(piece)
                end = piece.rfind(b"\n") + 1 if size >= block_bytes else 0
                pieces.append(piece[:end] if end else piece)
                if end:
                    yield Lines(file, b"".join(pieces), stream.tell() - block_start, first, last=False)
                    pieces = [piece[end:]]
                    size = len(piece) - end
                    block_start = stream.tell()
                    first = False
        except DamagedError as error:
            trouble = str(error)
        stored = file.stat().st_size - block_start
    content = b"".join(pieces)
    if trouble:
        content = content[: content.rfind(b"\n") + 1]
    yield Lines(file, content, stored, first, last=True, trouble=trouble)
