"""Reading token files: Megatron-LM's bytes, and damage that is noticed."""

from __future__ import annotations

import os
import resource
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import INDEX_HEADER, IndexedDataset
from tests.unit.data.pairs import LETTERS, NAMES, packed, write

S, D = 5, 6  # sequences and boundaries of the small dataset below


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "small", [list(range(n)) for n in (2, 3, 4, 5, 6)])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 127), max_size=4), max_size=3), max_size=9),
    code=st.sampled_from(sorted(LETTERS)),
)
def test_files_of_an_independent_writer_are_read(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], code: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    for suffix, data in zip(("bin", "idx"), packed(documents, code)):
        (folder / f"x.{suffix}").write_bytes(data)
    data = IndexedDataset(folder / "x", floats=True)
    sequences = [sequence for document in documents for sequence in document]
    assert data.dtype == np.dtype(NAMES[code])
    assert [data[i].tolist() for i in range(len(data))] == sequences
    assert data.tokens.tolist() == [i for sequence in sequences for i in sequence]
    assert data.lengths.tolist() == [len(s) for s in sequences]
    assert data.num_tokens == sum(map(len, sequences))
    read = [[data[i].tolist() for i in range(begin, end)] for begin, end in zip(data.documents, data.documents[1:])]
    assert read == documents


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_that_are_no_ids_are_refused_unless_asked_for(tmp_path: Path, dtype: type) -> None:
    prefix = write(tmp_path / "x", [[0.5, 1.0]], dtype)
    with pytest.raises(DataError, match=rf"x\.idx: the type is {np.dtype(dtype)}, but token ids"):
        IndexedDataset(prefix)
    assert IndexedDataset(prefix, floats=True)[0].tolist() == [0.5, 1.0]


def test_part_of_a_sequence(small: Path) -> None:
    data = IndexedDataset(small)
    assert data.get(4, 2).tolist() == [2, 3, 4, 5]
    assert data.get(4, 2, 3).tolist() == [2, 3, 4]
    assert data.get(4, 6).tolist() == []


@pytest.mark.parametrize(("i", "offset", "length"), [(5, 0, None), (-1, 0, None), (0, 3, None), (0, 1, 2), (0, -1, 1)])
def test_reading_outside_a_sequence_is_refused(small: Path, i: int, offset: int, length: int | None) -> None:
    with pytest.raises(IndexError, match="small"):
        IndexedDataset(small).get(i, offset, length)


# --- damage ---


def corrupt(prefix: Path, suffix: str, at: int, data: bytes) -> None:
    path = prefix.with_suffix(suffix)
    path.write_bytes(path.read_bytes()[:at] + data + path.read_bytes()[at + len(data) :])


LENGTHS, POINTERS, DOCUMENTS = INDEX_HEADER.size, INDEX_HEADER.size + 4 * S, INDEX_HEADER.size + 12 * S

DAMAGE = {
    "magic": (0, b"MMIDIDY", r"small\.idx: first 9 bytes is .*MMIDIDY.*expected .*MMIDIDX"),
    "version": (9, struct.pack("<Q", 2), r"small\.idx: version is 2, expected 1"),
    "code unknown": (17, b"\x09", r"small\.idx: type code is 9, expected one of 1 \(uint8\)"),
    "code of another size": (17, b"\x04", r"small\.idx: pointer of sequence 1 is 4, expected 8"),
    "sequences": (18, struct.pack("<Q", 4), r"small\.idx: size is 142 bytes, expected 130"),
    "sequences, whose product overflows": (18, struct.pack("<Q", 2**62 + S), r"expected \d{20} bytes"),
    "boundaries": (26, struct.pack("<Q", 7), r"small\.idx: size is 142 bytes, expected 150"),
    "no boundaries": (26, struct.pack("<Q", 0), r"small\.idx: number of document boundaries is 0"),
    "length": (LENGTHS, struct.pack("<i", 3), r"small\.idx: pointer of sequence 1 is 4, expected 6"),
    "length negative": (LENGTHS + 4, struct.pack("<i", -3), r"small\.idx: length of sequence 1 is -3"),
    "last length": (LENGTHS + 16, struct.pack("<i", 7), r"small\.bin: size is 40 bytes, expected 42 bytes"),
    "first pointer": (POINTERS, struct.pack("<q", 2), r"small\.idx: pointer of sequence 0 is 2, expected 0"),
    "first boundary": (DOCUMENTS, struct.pack("<q", 1), r"small\.idx: first and last document boundary is \(1, 5\)"),
    "last boundary": (DOCUMENTS + 40, struct.pack("<q", 4), r"is \(0, 4\), expected \(0, 5\)"),
    "boundaries fall": (
        DOCUMENTS + 16,
        struct.pack("<q", 0),
        r"small\.idx: boundary 2 of the documents is 0, expected 1 or more",
    ),
}


@pytest.mark.parametrize("field", DAMAGE)
def test_a_damaged_field_is_named(small: Path, field: str) -> None:
    at, data, message = DAMAGE[field]
    corrupt(small, ".idx", at, data)
    tracemalloc.start()
    with pytest.raises(DataError, match=message):
        IndexedDataset(small)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000  # bytes: nothing is made as large as in the header


@settings(max_examples=50, deadline=None, derandomize=True)
@given(at=st.integers(0, 141), data=st.binary(min_size=1, max_size=12))
def test_any_bytes_in_an_index_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, at: int, data: bytes
) -> None:
    small = write(tmp_path_factory.mktemp("any") / "small", [list(range(n)) for n in (2, 3, 4, 5, 6)])
    corrupt(small, ".idx", at, data)
    with suppress(DataError):
        read = IndexedDataset(small, floats=True)
        assert sum(len(read[i]) for i in range(len(read))) == read.num_tokens


def test_damage_far_into_a_large_index_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.data.indexed_dataset.ENTRIES_PER_CHECK", 3)
    prefix = write(tmp_path / "x", [[1]] * 10)
    whole = prefix.with_suffix(".idx").read_bytes()
    assert IndexedDataset(prefix).num_tokens == 10
    for i in range(10):
        corrupt(prefix, ".idx", INDEX_HEADER.size + 40 + 8 * i, struct.pack("<q", 99))
        with pytest.raises(DataError, match=f"pointer of sequence {i} is 99, expected {2 * i}"):
            IndexedDataset(prefix)
        prefix.with_suffix(".idx").write_bytes(whole)
    for i in range(1, 10):
        corrupt(prefix, ".idx", INDEX_HEADER.size + 120 + 8 * i, struct.pack("<q", i - 2))
        with pytest.raises(DataError, match=f"boundary {i} of the documents is {i - 2}, expected {i - 1} or more"):
            IndexedDataset(prefix)
        prefix.with_suffix(".idx").write_bytes(whole)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_every_shorter_or_longer_file_is_refused(small: Path, suffix: str) -> None:
    path = small.with_suffix(suffix)
    whole = path.read_bytes()
    for damaged in (*(whole[:size] for size in range(len(whole))), whole + b"\0"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"size is|first 9 bytes"):
            IndexedDataset(small)


def test_multimodal_data_is_refused_by_name(small: Path) -> None:
    path = small.with_suffix(".idx")
    path.write_bytes(path.read_bytes() + bytes(S))
    with pytest.raises(DataError, match="as of multimodal data"):
        IndexedDataset(small)


def foreign_text(path: Path) -> None:
    path.write_text('{"text": "a line that is longer than a header would be"}\n' * 3)


FOREIGN: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "text": (foreign_text, "first 9 bytes is .*this is not a token index", "size is 171 bytes, expected 40"),
    "nothing": (Path.touch, "size is 0 bytes, expected a header of 34", "size is 0 bytes, expected 40"),
    "a folder": (Path.mkdir, "Is a directory", "Is a directory"),
    "a dead link": (lambda path: path.symlink_to("none"), "No such file", "No such file"),
}


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_is_refused(small: Path, kind: str, suffix: str) -> None:
    make, of_index, of_ids = FOREIGN[kind]
    path = small.with_suffix(suffix)
    path.unlink()
    make(path)
    with pytest.raises(DataError, match=rf"small\{suffix}: {of_index if suffix == '.idx' else of_ids}"):
        IndexedDataset(small)


def test_the_fix_fits_the_error(small: Path) -> None:
    with pytest.raises(DataError, match=rf"fix: give the path without \.bin: {small}$"):
        IndexedDataset(f"{small}.bin")
    with pytest.raises(DataError, match=r"fix: give the path without \.bin/\.idx, as"):
        IndexedDataset(f"{small}2")
    with pytest.raises(DataError, match=rf"fix: name a pair in that folder: {small.parent}/NAME"):
        IndexedDataset(small.parent)
    with pytest.raises(DataError, match="embedded null byte"):
        IndexedDataset("a\0b")
    small.with_suffix(".bin").unlink()
    with pytest.raises(DataError, match="fix: copy both files again"):
        IndexedDataset(small)


def test_too_many_open_files_are_no_wrong_path(small: Path) -> None:
    limits, limit = resource.getrlimit(resource.RLIMIT_NOFILE), 1 + max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
    try:
        with pytest.raises(DataError, match="Too many open files\n  fix: ulimit -n"):
            [IndexedDataset(small) for _ in range(limit)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
