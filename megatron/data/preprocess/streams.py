"""Read the text of a file as a stream, in bounded memory: decompressed, and each value of a JSON array as a line."""

from __future__ import annotations

import bz2
import codecs
import io
import json
import lzma
import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import IO, Any

from megatron.data.preprocess.remote import InputFile

COMPRESSION_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
MAX_PIECE_BYTES = 16 << 20  # approximate upper limit of the text yielded at once
READ_BYTES_OF_SUFFIX = {".gz": 1 << 14, ".zst": 1 << 9, ".bz2": 1 << 14, ".xz": 1 << 14}
"""Compressed bytes read at once. The libraries for .bz2 and .xz take `MAX_PIECE_BYTES` as a limit. For the others it
follows from the highest compression: a factor of about 1000 for .gz, and 4 bytes for a block of 128 kB for .zst."""
READ_BYTES = 1 << 16  # of a file that is not compressed
MAX_WINDOW_BYTES = 1 << 31
"""Memory that a .zst or .xz file may ask for: what ``zstd --long=31`` does, and more than ``xz -9e``."""
PADDING = b"\0"  # appended to .gz by tar and tape tools, and allowed in .xz
BEGINS_WITH_VALUES = re.compile(rb"\[\s*[^\s\]]|{[ \t\r]*\n\s*\"")
"""The beginning of a text that is an array of something, or an object over several lines."""


class DamagedStreamError(Exception):
    """The rest of a file cannot be read, for the reason in the message, with fixes."""

    def __init__(self, reason: str, *fixes: str) -> None:
        super().__init__(reason)
        self.fixes = fixes


def compression_suffix(file: InputFile) -> str:
    """Return the suffix of the compression in lower case, or an empty string."""
    suffix = file.suffix.lower()
    return suffix if suffix in COMPRESSION_SUFFIXES else ""


def recode_fix(file: InputFile, encoding: str) -> str:
    """Return the command that converts a file to UTF-8."""
    if compression_suffix(file):
        return f"decompress it and convert it from {encoding} with iconv"
    name, new = shlex.quote(str(file)), shlex.quote(str(file.with_stem(f"{file.stem}.utf8")))
    return f"iconv -f {encoding} -t UTF-8 {name} > {new}"


class PieceReader(io.RawIOBase):
    """A stream of the pieces of a text. It ends where the rest cannot be read, for the reason in ``damage``."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")
        self.damage: DamagedStreamError | None = None

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Copy the next bytes to ``buffer``, and return their number; 0 at the end."""
        try:
            while not self._rest:
                self._rest = memoryview(next(self._pieces))
        except StopIteration:
            return 0
        except DamagedStreamError as error:
            self.damage = error
            return 0
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def read_pieces(file: InputFile, stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the text of an open file, decompressed."""
    return decompress(file, stream) if compression_suffix(file) else iter(lambda: stream.read(READ_BYTES), b"")


def decompress(file: InputFile, stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of a file that ends in one of `COMPRESSION_SUFFIXES`. Concatenated streams are one text.

    Raises:
        DamagedStreamError: if the file is truncated or not in the format of its suffix.
    """
    suffix = compression_suffix(file)
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
        raise DamagedStreamError(f"is not valid {suffix} from here on: {error}", "copy the file again") from error
    if not at_start:
        raise DamagedStreamError(f"ends in the middle of a {suffix} stream", "copy the file again")


def _library(suffix: str) -> tuple[Callable[[], Any], type[Exception]]:
    """Return a factory of decompressors, and the error they raise."""
    if suffix == ".gz":
        return lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error
    if suffix == ".bz2":
        return bz2.BZ2Decompressor, OSError
    if suffix == ".xz":
        return lambda: lzma.LZMADecompressor(memlimit=MAX_WINDOW_BYTES), lzma.LZMAError
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj, zstandard.ZstdError


def holds_values(file: InputFile) -> bool:
    """Return True if a file begins with a JSON array of something, or with an object over several lines."""
    start = b""
    with file.open("rb") as stream, suppress(DamagedStreamError):
        for piece in read_pieces(file, stream):
            start = (start + piece).removeprefix(codecs.BOM_UTF8).lstrip()
            if len(start) >= READ_BYTES // 16:
                break
    return BEGINS_WITH_VALUES.match(start) is not None


def json_values(file: InputFile, pieces: Iterator[bytes], max_bytes: int) -> Iterator[bytes]:
    """Yield the values of the JSON text of a file as lines: the elements of its arrays, and other values.

    Raises:
        DamagedStreamError: for a value that is not JSON in UTF-8, or longer than ``max_bytes``.
    """
    try:
        yield from _values(pieces, max_bytes)
    except UnicodeDecodeError as error:
        raise DamagedStreamError(f"is not UTF-8 text: {error.reason}", recode_fix(file, "LATIN1")) from error
    except ValueError as error:
        raise DamagedStreamError(f"is not JSON from here on: {error}", "mend this value") from error


def _values(pieces: Iterator[bytes], max_bytes: int) -> Iterator[bytes]:
    decoder, parse = codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder().raw_decode
    text, at, inside, ended, tried = "", 0, False, False, 0
    while True:
        at = next((i for i in range(at, len(text)) if text[i] not in " \t\r\n"), len(text))
        mark = text[at : at + 1]
        if mark and mark in ("],", "[")[not inside]:
            at, inside = at + 1, mark != "]"
            continue
        end = 0
        if mark and (ended or len(text) - at >= 2 * tried):  # a longer value is parsed again once there is as much more
            try:
                _, end = parse(text, at)
            except (ValueError, RecursionError) as error:
                if ended or len(text) - at > max_bytes:
                    raise ValueError(f"{error}" if ended else f"longer than {max_bytes:,} bytes, or {error}") from error
                tried = len(text) - at
        if end and (ended or end < len(text)):  # else a number may go on
            yield text[at:end].replace("\r", " ").replace("\n", " ").encode() + b"\n"
            at, tried = end, 0
        elif not ended:
            piece = next(pieces, None)
            ended = piece is None
            text, at = text[at:] + decoder.decode(piece or b"", final=ended), 0
        elif not mark:
            break
    if inside:
        raise ValueError("the array does not end")
