"""Stream the contents of compressed files."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol

from megatron.data.errors import DataError

SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
PIECE_BYTES = 16 << 20  # approximate upper limit of the text yielded at once
READ_BYTES = {".gz": 1 << 14, ".zst": 1 << 9, ".bz2": 1 << 14, ".xz": 1 << 14}
"""Compressed bytes read at once. The libraries for .bz2 and .xz take `MAX_PIECE_BYTES` as a limit. For the others it
follows from the highest compression: a factor of about 1000 for .gz, and 4 bytes for a block of 128 kB for .zst."""
PADDING = b"\0"  # appended to .gz by tar and tape tools, and allowed in .xz


class DamagedError(Exception):
    """The rest of a compressed file cannot be read, for the reason in the message."""


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def decompressed(file: Path, stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of a file that ends in one of `COMPRESSION_SUFFIXES`. Concatenated streams are one text.

    Raises:
        DamagedError: if the file is truncated or not in the format of its suffix.
        DataError: if the required library is missing.
    """
    suffix = file.suffix.lower()
    new_decompressor, errors = _library(suffix)
    current = new_decompressor()
    at_start = True  # nothing of the current stream has been read
    try:
        while data := stream.read(READ_BYTES[suffix]):
            while data := data.lstrip(PADDING) if at_start else data:
                yield from _pieces(current, data)
                data, at_start = current.unused_data, current.eof
                if current.eof:
                    current = new_decompressor()
    except errors as error:
        raise DamagedError(f"is not valid {suffix} from here on: {error}") from error
    if not at_start:
        raise DamagedError(f"ends in the middle of a {suffix} stream")


def _pieces(current: _Decompressor, data: bytes) -> Iterator[bytes]:
    """Decompress ``data`` up to the end of the current stream."""
    if not isinstance(current, bz2.BZ2Decompressor | lzma.LZMADecompressor):
        yield current.decompress(data)
        return
    yield current.decompress(data, PIECE_BYTES)
    while not current.needs_input and not current.eof:
        yield current.decompress(b"", PIECE_BYTES)


def _library(suffix: str) -> tuple[Callable[[], _Decompressor], type[Exception] | tuple[type[Exception], ...]]:
    """Return a factory of decompressors, and the errors they raise."""
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
