"""Compressed files as streams of bytes, a piece at a time."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol

from megatron.data.errors import DataError

SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
PIECE_BYTES = 16 << 20  # of text at most, about
READ_BYTES = {".gz": 1 << 14, ".zst": 1 << 9, ".bz2": 1 << 14, ".xz": 1 << 14}
"""What is read at once. The libraries of .bz2 and .xz stop at `PIECE_BYTES` of text; of the others so much cannot give
more: .gz compresses a thousandfold at most, .zst a block of 128 kB to 4 bytes."""
PADDING = b"\0"  # tar and tape tools leave it behind a .gz, and .xz allows it


class DamagedError(Exception):
    """The rest of a compressed file cannot be read; the text says why."""


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def decompressed(file: Path, stream: IO[bytes]) -> Iterator[bytes]:
    """The content of a file that ends in one of `SUFFIXES`, in pieces; several streams back to back are one text.

    Raises:
        DamagedError: when the file is cut short, or is not what its name says.
        DataError: when the library that reads it is missing.
    """
    suffix = file.suffix.lower()
    new, errors = _library(suffix)
    current = new()
    fresh = True  # nothing of the current stream has been read
    try:
        while data := stream.read(READ_BYTES[suffix]):
            while data := data.lstrip(PADDING) if fresh else data:
                yield from _pieces(current, data)
                data, fresh = current.unused_data, current.eof
                if current.eof:
                    current = new()
    except errors as error:
        raise DamagedError(f"is no {suffix} from here on: {error}") from error
    if not fresh:
        raise DamagedError(f"ends in the middle of a {suffix} stream")


def _pieces(current: _Decompressor, data: bytes) -> Iterator[bytes]:
    """What is in ``data``, which is a part of one stream and perhaps more."""
    if not isinstance(current, bz2.BZ2Decompressor | lzma.LZMADecompressor):
        yield current.decompress(data)
        return
    yield current.decompress(data, PIECE_BYTES)
    while not current.needs_input and not current.eof:
        yield current.decompress(b"", PIECE_BYTES)


def _library(suffix: str) -> tuple[Callable[[], _Decompressor], type[Exception] | tuple[type[Exception], ...]]:
    """What decompresses, and what it raises."""
    if suffix == ".gz":
        return lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error
    if suffix == ".bz2":
        return bz2.BZ2Decompressor, OSError
    if suffix == ".xz":
        return lzma.LZMADecompressor, lzma.LZMAError
    try:
        import zstandard
    except ImportError as error:
        raise DataError("zstandard is needed for .zst files", "pip install zstandard") from error
    library = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    return library.decompressobj, zstandard.ZstdError
