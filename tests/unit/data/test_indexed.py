"""Token files: Megatron-LM's bytes, damage that is noticed, pairs that are whole or absent."""

from __future__ import annotations

import errno
import io
import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import DTypeLike

from megatron.data.errors import DataError
from megatron.data.indexed import HEADER, IndexedDataset, IndexedDatasetWriter, id_dtype

GOLDEN = Path(__file__).parents[2] / "golden" / "megatron" / "case0"
S, D = 5, 6  # sequences and boundaries of the small dataset below


def write(prefix: Path, documents: Iterable[Sequence[float]], dtype: DTypeLike = np.uint16) -> Path:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "small", [list(range(n)) for n in (2, 3, 4, 5, 6)])


def test_index_bytes_are_those_of_the_format_description(small: Path) -> None:
    expected = bytes.fromhex("4d4d494449445800 00 0100000000000000 08 0500000000000000 0600000000000000")
    expected += np.array([2, 3, 4, 5, 6], "<i4").tobytes() + np.array([0, 4, 10, 18, 28], "<i8").tobytes()
    expected += np.array([0, 1, 2, 3, 4, 5], "<i8").tobytes()
    assert len(expected) == 142
    assert small.with_suffix(".idx").read_bytes() == expected


def test_files_of_megatron_are_read_and_written_again_byte_for_byte(tmp_path: Path) -> None:
    golden = IndexedDataset(GOLDEN)
    assert len(golden) == 200
    write(tmp_path / "copy", [golden[i].tolist() for i in range(len(golden))])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"copy{suffix}").read_bytes() == GOLDEN.with_suffix(suffix).read_bytes()


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 127), max_size=9), max_size=12),
    dtype=st.sampled_from(["u1", "i1", "i2", "i4", "i8", "u2"]),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], dtype: str
) -> None:
    data = IndexedDataset(write(tmp_path_factory.mktemp("any") / "x", documents, dtype))
    sequences = [d for d in documents if d]
    assert data.dtype == np.dtype(dtype)
    assert [data[i].tolist() for i in range(len(data))] == sequences
    assert data.lengths.tolist() == [len(s) for s in sequences]
    assert data.num_tokens == sum(map(len, documents))
    read = [
        [t for i in range(begin, end) for t in data[i].tolist()]
        for begin, end in zip(data.documents, data.documents[1:])
    ]
    assert read == documents


def test_a_document_may_have_several_sequences(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", np.int32) as writer:
        writer.add_sequence([1, 2])
        writer.add_sequence([3])
        writer.end_document()
        writer.add_document([4])
        assert (writer.num_documents, writer.num_tokens) == (2, 4)
    data = IndexedDataset(tmp_path / "x")
    assert data.documents.tolist() == [0, 2, 3]


def test_part_of_a_sequence(small: Path) -> None:
    data = IndexedDataset(small)
    assert data.get(4, 2).tolist() == [2, 3, 4, 5]
    assert data.get(4, 2, 3).tolist() == [2, 3, 4]
    assert data.get(4, 6).tolist() == []


@settings(max_examples=40, deadline=None)
@given(batches=st.lists(st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=6), max_size=5))
def test_many_documents_at_once_are_those_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[list[int]]]
) -> None:
    folder = tmp_path_factory.mktemp("many")
    write(folder / "one", [document for batch in batches for document in batch])
    with IndexedDatasetWriter(folder / "many", np.uint16) as writer:
        for batch in batches:
            ids = np.array([i for document in batch for i in document], dtype=np.int64)
            writer.add_documents(ids, np.array([len(document) for document in batch], dtype=np.int32))
        assert writer.num_documents == sum(map(len, batches))
    for suffix in ("bin", "idx"):
        assert (folder / f"many.{suffix}").read_bytes() == (folder / f"one.{suffix}").read_bytes()


@pytest.mark.parametrize(
    ("ids", "lengths", "error", "message"),
    [
        ([1, 65536], [1, 1], DataError, "id 65536 does not fit uint16"),
        ([1, 2, 3], [1, 1], ValueError, "lengths sum to 2, but there are 3 ids"),
        ([1], [2, -1], ValueError, "a document of -1 tokens"),
        ([], [2**31], DataError, "a sequence of 2147483648 tokens; at most 2147483647"),
    ],
)
def test_documents_that_cannot_be_are_refused(
    tmp_path: Path, ids: list[int], lengths: list[int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message), IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_documents(np.array(ids, dtype=np.int64), np.array(lengths))
    assert content(tmp_path) == {}


@pytest.mark.parametrize(("i", "offset", "length"), [(5, 0, None), (-1, 0, None), (0, 3, None), (0, 1, 2), (0, -1, 1)])
def test_reading_outside_a_sequence_is_refused(small: Path, i: int, offset: int, length: int | None) -> None:
    with pytest.raises(IndexError, match="small"):
        IndexedDataset(small).get(i, offset, length)


@pytest.mark.parametrize(("vocab", "name"), [(257, "uint16"), (65499, "uint16"), (65500, "int32"), (128256, "int32")])
def test_id_type_of_a_vocabulary(vocab: int, name: str) -> None:
    assert id_dtype(vocab).name == name


@pytest.mark.parametrize("ids", [[0, 65536], [-1, 5], [0.5]])
def test_ids_that_do_not_fit_are_refused_and_leave_nothing(tmp_path: Path, ids: list[float]) -> None:
    with pytest.raises(DataError, match="does not fit uint16"):
        write(tmp_path / "x", [[1, 2], ids])
    assert content(tmp_path) == {}


def test_a_type_that_holds_no_ids_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="float32 holds no token ids"):
        IndexedDatasetWriter(tmp_path / "x", np.float32)
    assert content(tmp_path) == {}


# --- whole or absent ---


def test_an_interrupted_writer_leaves_the_old_pair_alone(small: Path) -> None:
    before = content(small.parent)

    def interrupted() -> Iterator[list[int]]:
        yield [9, 9, 9]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(small, interrupted())
    assert content(small.parent) == before


def test_a_killed_writer_leaves_no_pair(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from megatron.data.indexed import IndexedDatasetWriter\n"
        "with IndexedDatasetWriter(sys.argv[1], 'u2') as writer:\n"
        "    writer.add_document(range(1000))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "x")], cwd=root, check=False)
    assert not {"x.bin", "x.idx"} & set(os.listdir(tmp_path))
    with pytest.raises(DataError, match="No such file"):
        IndexedDataset(tmp_path / "x")


def test_the_index_gets_its_name_last_and_loses_it_first(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail at each rename in turn: no index is ever beside ids that are not its own."""
    replace, old = os.replace, content(small.parent)

    def fail_at(n: int) -> None:
        calls = iter(range(9))

        def stop(source: str, target: str) -> None:
            if next(calls) == n:
                raise OSError("no space left")
            replace(source, target)

        monkeypatch.setattr(os, "replace", stop)

    for n, present in enumerate([{"small.bin"}, {"small.bin"}, {"small.bin", "small.note"}]):
        for name, data in old.items():
            (small.parent / name).write_bytes(data)
        fail_at(n)
        writer = IndexedDatasetWriter(small, np.uint16)
        writer.add_file("note", b"beside")
        writer.add_document([7] * 50)
        with pytest.raises(OSError, match="no space left"), writer:
            pass
        assert set(content(small.parent)) == present


def test_a_folder_beside_the_pair_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_with(prefix: Path, *names: str) -> None:
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            writer.add_document([7])
            for name in names:
                writer.add_file(f"beside/{name}", name.encode())

    write_with(tmp_path / "x", "a", "b")
    write_with(tmp_path / "x", "b", "c")
    assert content(tmp_path / "x.beside") == {"b": b"b", "c": b"c"}
    assert len(IndexedDataset(tmp_path / "x")) == 1

    def full(*paths: str) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write_with(tmp_path / "y", "a", "b")
    assert sorted(os.listdir(tmp_path)) == ["x.beside", "x.bin", "x.idx"]


def test_a_full_disk_leaves_the_old_pair_alone(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(small.parent)
    writer = IndexedDatasetWriter(small, np.uint16)
    writer.add_document([7] * 50)

    class Full(io.BufferedWriter):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "no space left")

    writer._bin.close()
    monkeypatch.setattr(writer, "_bin", Full(io.FileIO(os.devnull, "wb")))
    with pytest.raises(OSError, match="no space left"), writer:
        pass
    assert content(small.parent) == before


# --- damage ---


def corrupt(prefix: Path, suffix: str, at: int, data: bytes) -> None:
    path = prefix.with_suffix(suffix)
    path.write_bytes(path.read_bytes()[:at] + data + path.read_bytes()[at + len(data) :])


LENGTHS, POINTERS, DOCUMENTS = HEADER.size, HEADER.size + 4 * S, HEADER.size + 12 * S

DAMAGE = {
    "magic": (0, b"MMIDIDY", r"small\.idx: first 9 bytes is .*MMIDIDY.*expected .*MMIDIDX"),
    "version": (9, struct.pack("<Q", 2), r"small\.idx: version is 2, expected 1"),
    "code unknown": (17, b"\x09", r"small\.idx: type code is 9, expected one of 1 \(uint8\)"),
    "code of floats": (17, b"\x07", r"small\.idx: type code is 7"),
    "code of another size": (17, b"\x04", r"small\.idx: pointer of sequence 1 is 4, expected 8"),
    "sequences": (18, struct.pack("<Q", 4), r"small\.idx: size is 142 bytes, expected 130"),
    "sequences, absurd": (18, struct.pack("<Q", 2**63), r"small\.idx: size is 142 bytes"),
    "boundaries": (26, struct.pack("<Q", 7), r"small\.idx: size is 142 bytes, expected 150"),
    "no boundaries": (26, struct.pack("<Q", 0), r"small\.idx: number of document boundaries is 0"),
    "length": (LENGTHS, struct.pack("<i", 3), r"small\.idx: pointer of sequence 1 is 4, expected 6"),
    "length negative": (LENGTHS + 4, struct.pack("<i", -3), r"small\.idx: length of sequence 1 is -3"),
    "last length": (LENGTHS + 16, struct.pack("<i", 7), r"small\.bin: size is 40 bytes, expected 42 bytes"),
    "first pointer": (POINTERS, struct.pack("<q", 2), r"small\.idx: pointer of sequence 0 is 2, expected 0"),
    "last pointer": (POINTERS + 32, struct.pack("<q", 0), r"small\.idx: pointer of sequence 4 is 0, expected 28"),
    "first boundary": (DOCUMENTS, struct.pack("<q", 1), r"small\.idx: first and last document boundary is \(1, 5\)"),
    "last boundary": (DOCUMENTS + 40, struct.pack("<q", 4), r"is \(0, 4\), expected \(0, 5\)"),
    "boundaries fall": (DOCUMENTS + 16, struct.pack("<q", 0), r"small\.idx: document boundaries is one below"),
}


@pytest.mark.parametrize("field", DAMAGE)
def test_a_damaged_field_is_named(small: Path, field: str) -> None:
    at, data, message = DAMAGE[field]
    corrupt(small, ".idx", at, data)
    with pytest.raises(DataError, match=message):
        IndexedDataset(small)


def test_damage_far_into_a_large_index_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.data.indexed.SEQUENCES_PER_CHECK", 3)
    prefix = write(tmp_path / "x", [[1]] * 10)
    assert IndexedDataset(prefix).num_tokens == 10
    corrupt(prefix, ".idx", HEADER.size + 40 + 8 * 7, struct.pack("<q", 0))
    with pytest.raises(DataError, match="pointer of sequence 7 is 0, expected 14"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_cut_short_or_too_long_is_refused(small: Path, suffix: str) -> None:
    path = small.with_suffix(suffix)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole + b"\0", b""):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=f"small\\{suffix}: size is {len(damaged)} bytes, expected"):
            IndexedDataset(small)


def test_every_shorter_index_is_refused(small: Path) -> None:
    path = small.with_suffix(".idx")
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"size is|first 9 bytes"):
            IndexedDataset(small)


def test_multimodal_data_is_refused_by_name(small: Path) -> None:
    path = small.with_suffix(".idx")
    path.write_bytes(path.read_bytes() + bytes(S))
    with pytest.raises(DataError, match="as of multimodal data"):
        IndexedDataset(small)


def test_a_foreign_file_is_refused(small: Path) -> None:
    small.with_suffix(".idx").write_text("this is some text, longer than a header would be\n" * 3)
    with pytest.raises(DataError, match="no index of tokens"):
        IndexedDataset(small)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_named(small: Path, suffix: str) -> None:
    small.with_suffix(suffix).unlink()
    with pytest.raises(DataError, match=f"small\\{suffix}: No such file"):
        IndexedDataset(small)
