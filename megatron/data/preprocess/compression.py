"""Decompress text files as streams, in bounded memory."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from megatron.data.errors import DataError

COMPRESSION_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
MAX_PIECE_BYTES = 16 << 20  # approximate upper limit of the text yielded at once
READ_BYTES_OF_SUFFIX = {".gz": 1 << 14, ".zst": 1 << 9, ".bz2": 1 << 14, ".xz": 1 << 14}
"""Compressed bytes read at once. The libraries for .bz2 and .xz take `MAX_PIECE_BYTES` as a limit. For the others it
follows from the highest compression: a factor of about 1000 for .gz, and 4 bytes for a block of 128 kB for .zst."""
MAX_WINDOW_BYTES = 1 << 31
"""Memory that a .zst or .xz file may ask for: what ``zstd --long=31`` does, and more than ``xz -9e``."""
PADDING = b"\0"  # appended to .gz by tar and tape tools, and allowed in .xz


class DamagedStreamError(Exception):
    """The rest of a compressed file cannot be read, for the reason in the message."""


def decompress(file: Path, stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of a file that ends in one of `COMPRESSION_SUFFIXES`. Concatenated streams are one text.

    Raises:
        DamagedStreamError: if the file is truncated or not in the format of its suffix.
        DataError: if the required library is missing.
    """
    suffix = file.suffix.lower()
    new_decompressor, error_type = _library(suffix)
    current = new_decompressor()
    at_start = True  # nothing of the current stream has been read
    try:
        while data := stream.read(READ_BYTES_OF_SUFFIX[suffix]):
            while data := data.lstrip(PADDING) if at_start else data:
                if suffix in (".bz2", ".xz"):
                    yield current.decompress(data, MAX_PIECE_BYTES)
                    while not current.needs_input and not current.eof:
                        yield current.decompress(b"", MAX_PIECE_BYTES)
                else:
                    yield current.decompress(data)
                data, at_start = current.unused_data, current.eof
                if current.eof:
                    current = new_decompressor()
    except error_type as error:
        raise DamagedStreamError(f"is not valid {suffix} from here on: {error}") from error
    if not at_start:
        raise DamagedStreamError(f"ends in the middle of a {suffix} stream")


def _library(suffix: str) -> tuple[Callable[[], Any], type[Exception]]:
    """Return a factory of decompressors, and the error they raise."""
    if suffix == ".gz":
        return lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error
    if suffix == ".bz2":
        return bz2.BZ2Decompressor, OSError
    if suffix == ".xz":
        return lambda: lzma.LZMADecompressor(memlimit=MAX_WINDOW_BYTES), lzma.LZMAError
    try:
        import zstandard
    except ImportError as error:
        raise DataError("zstandard is needed for .zst files", "pip install zstandard") from error
    return zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj, zstandard.ZstdError
