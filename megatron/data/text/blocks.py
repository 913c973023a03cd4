"""Files cut into blocks: whole lines of JSON, or plain files, as much as one worker takes at a time.

Where the cuts lie changes neither the documents nor their order.
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
    """Whole lines of a file of JSON lines.

    Attributes:
        file: where they are.
        content: the lines, or the bytes of the file that they are.
        stored: bytes of the file that they took, compressed if it is.
        first: the file begins with them.
        last: the file ends with them.
        trouble: why the rest of the file cannot be read; empty if nothing is wrong.
    """

    file: Path
    content: bytes | range
    stored: int
    first: bool
    last: bool
    trouble: str = ""

    def read(self) -> bytes:
        """The lines.

        Raises:
            DataError: when the file is shorter than it was.
        """
        if isinstance(self.content, bytes):
            return self.content
        with open(self.file, "rb") as stream:
            stream.seek(self.content.start)
            content = stream.read(len(self.content))
        if len(content) != len(self.content):
            raise DataError(f"{self.file} became shorter while it was read", "start again when nobody writes it")
        return content


class Texts(NamedTuple):
    """Plain files, one document each.

    Attributes:
        files: where they are.
        stored: bytes of them, compressed if they are.
    """

    files: tuple[Path, ...]
    stored: int


Block = Lines | Texts


def holds_lines(file: Path) -> bool:
    """Whether a file is one of JSON lines, by its name in any case."""
    return unpacked_name(file).lower().endswith(JSON_LINES)


def compression(file: Path) -> str:
    """The suffix, in small letters, that says how a file is compressed; empty if it is not."""
    suffix = file.suffix.lower()
    return suffix if suffix in SUFFIXES else ""


def unpacked_name(file: Path) -> str:
    """The name without the suffix of a compression."""
    return file.name[: len(file.name) - len(compression(file))]


def weight(block: Block) -> int:
    """Bytes that a block holds, as far as is known before it is read."""
    return block.stored if isinstance(block, Texts) else len(block.content)


def cut(files: Sequence[Path], block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Blocks of about ``block_bytes`` of text, in the order of the files; longer ones where a single line is longer.

    Raises:
        OSError: when a file cannot be read.
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
    """The blocks of one file of JSON lines: at least one."""
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
    """The first position from ``position`` on that has a line end before it; the end of the file if there is none."""
    position -= 1
    while position < size:
        stream.seek(position)
        seen = stream.read(SEARCH_BYTES)
        if not seen:
            break
        if (found := seen.find(b"\n")) >= 0:
            return position + found + 1
        position += len(seen)
    return size


def _cut_compressed(file: Path, block_bytes: int) -> Iterator[Lines]:
    pieces: list[bytes] = []
    size = before = 0
    first, trouble = True, ""
    with open(file, "rb") as stream:
        try:
            for piece in decompressed(file, stream):
                size += len(piece)
                end = piece.rfind(b"\n") + 1 if size >= block_bytes else 0
                pieces.append(piece[:end] if end else piece)
                if end:
                    yield Lines(file, b"".join(pieces), stream.tell() - before, first, last=False)
                    pieces, size, before, first = [piece[end:]], len(piece) - end, stream.tell(), False
        except DamagedError as error:
            trouble = str(error)
        stored = file.stat().st_size - before
    whole = b"".join(pieces)
    if trouble:
        whole = whole[: whole.rfind(b"\n") + 1]
    yield Lines(file, whole, stored, first, last=True, trouble=trouble)
