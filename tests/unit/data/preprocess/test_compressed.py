"""Compressed files: the bytes that were put in, and a word where some are missing."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
from pathlib import Path

import pytest
import zstandard

from megatron.data.errors import DataError
from megatron.data.preprocess.corpus import COMPRESSION_SUFFIXES, DamagedStreamError, decompress

TEXT = b"".join(b"line %d of a text that compresses, %d\n" % (i, i * i) for i in range(20_000))
COMPRESS = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def read(suffix: str, content: bytes) -> bytes:
    return b"".join(decompress(Path(f"x{suffix}"), io.BytesIO(content)))


def test_every_suffix_is_tried() -> None:
    assert set(COMPRESS) == set(COMPRESSION_SUFFIXES)


@pytest.mark.parametrize("suffix", COMPRESSION_SUFFIXES)
def test_streams_back_to_back_are_one_text(suffix: str) -> None:
    stream = COMPRESS[suffix](TEXT)
    assert read(suffix, b"") == b""
    assert read(suffix, stream) == TEXT
    assert read(suffix, stream + COMPRESS[suffix](b"") + COMPRESS[suffix](b"end")) == TEXT + b"end"


def test_padding_is_no_stream() -> None:
    stream = gzip.compress(TEXT)
    assert read(".gz", stream + bytes(100)) == TEXT
    assert read(".gz", stream + bytes(100_000) + stream) == TEXT + TEXT


@pytest.mark.parametrize("suffix", COMPRESSION_SUFFIXES)
def test_a_cut_file_is_told_after_what_it_holds(suffix: str) -> None:
    stream = COMPRESS[suffix](TEXT)
    for cut in (4, len(stream) // 2, len(stream) - 1):
        for before in (b"", stream):
            pieces = decompress(Path(f"x{suffix}"), io.BytesIO(before + stream[:cut]))
            held: list[bytes] = []
            with pytest.raises(DamagedStreamError, match=f"ends in the middle of a {suffix} stream"):
                held.extend(pieces)
            seen = b"".join(held)
            assert ((TEXT if before else b"") + TEXT).startswith(seen)
            assert len(seen) >= len(TEXT) * bool(before)


@pytest.mark.parametrize("suffix", COMPRESSION_SUFFIXES)
def test_a_damaged_or_other_file_is_told(suffix: str) -> None:
    stream = bytearray(COMPRESS[suffix](TEXT))
    stream[len(stream) // 2] ^= 0xFF
    for content in (bytes(stream), b"plain text", COMPRESS[suffix](TEXT) + b"plain text"):
        with pytest.raises(DamagedStreamError, match=f"is not valid {suffix} from here on|middle of a {suffix} stream"):
            read(suffix, content)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(DataError, match=r"zstandard is needed for \.zst files\n  fix: pip install zstandard"):
        read(".zst", b"")


@pytest.mark.parametrize("suffix", COMPRESSION_SUFFIXES)
def test_pieces_are_small_however_well_a_text_compresses(suffix: str) -> None:
    size = 100_000_000
    pieces = [len(piece) for piece in decompress(Path(f"x{suffix}"), io.BytesIO(COMPRESS[suffix](bytes(size))))]
    assert sum(pieces) == size
    assert max(pieces) <= 17_000_000
