"""Writing token files: the bytes of the format, and pairs that are whole or absent."""

from __future__ import annotations

import errno
import io
import os
import signal
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter, id_dtype, publish_all, remove_unfinished_files
from tests.unit.data.pairs import GOLDEN, LETTERS, NAMES, content, packed, pair, write

LIMITS = {code: (np.iinfo(NAMES[code]).min, np.iinfo(NAMES[code]).max) for code in LETTERS if code not in (6, 7)}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "small", [list(range(n)) for n in (2, 3, 4, 5, 6)])


@pytest.mark.parametrize("case", ["case0", "case1", "case2"])
def test_files_of_megatron_are_written_again_byte_for_byte(tmp_path: Path, case: str) -> None:
    golden = IndexedDataset(GOLDEN / case)
    assert golden.dtype.name == ("int32" if case == "case2" else "uint16")
    write(tmp_path / "copy", [golden[i].tolist() for i in range(len(golden))], golden.dtype)
    assert pair(tmp_path / "copy") == pair(GOLDEN / case)


def numbers(code: int) -> st.SearchStrategy[float]:
    if code in LIMITS:
        return st.integers(*LIMITS[code])
    return st.floats(width=64 if code == 6 else 32)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(code=st.sampled_from(sorted(LETTERS)), data=st.data())
def test_documents_of_every_type_have_the_bytes_of_the_format(
    tmp_path_factory: pytest.TempPathFactory, code: int, data: st.DataObject
) -> None:
    """As an independent writer packs them; written in batches."""
    batches = data.draw(st.lists(st.lists(st.lists(numbers(code), max_size=4), max_size=6), max_size=4))
    prefix = tmp_path_factory.mktemp("any") / "x"
    with IndexedDatasetWriter(prefix, NAMES[code]) as writer:
        for batch in batches:
            ids = np.array([number for document in batch for number in document], dtype=NAMES[code])
            writer.add_documents(ids, np.array([len(document) for document in batch], dtype=np.int32))
    documents = [document for batch in batches for document in batch]
    assert (writer.num_documents, writer.num_tokens) == (len(documents), sum(map(len, documents)))
    assert pair(prefix) == packed([[document] if document else [] for document in documents], code)


def test_tables_that_are_written_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.data.indexed_writer.TABLE_BLOCK", 3)
    monkeypatch.setattr("megatron.data.indexed_writer.COPY_BYTES", 5)
    documents = [[i] * (i % 4) for i in range(10)]
    seen: list[int] = []
    one = IndexedDataset(write(tmp_path / "x", documents))
    with IndexedDatasetWriter(tmp_path / "twice", np.uint16) as writer:
        for _ in range(2):
            writer.add_pair(one, seen.append)
    assert pair(tmp_path / "twice") == packed([[d] if d else [] for d in documents * 2], 8)
    assert seen == [5, 5, 5, 5, 5, 1] * 2


def test_memory_does_not_grow_with_the_output(tmp_path: Path) -> None:
    ids, lengths = np.zeros(50_000, dtype=np.uint16), np.ones(50_000, dtype=np.int64)
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_documents(ids, lengths)
        tracemalloc.start()
        for _ in range(20):
            writer.add_documents(ids, lengths)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert held < 100_000
    assert peak < 20 * 50_000  # bytes: no more than some numbers for each document of one call
    assert IndexedDataset(tmp_path / "x").num_tokens == 21 * 50_000


@pytest.mark.parametrize(("vocab", "name"), [(257, "uint16"), (65499, "uint16"), (65500, "int32"), (128256, "int32")])
def test_id_type_of_a_vocabulary(vocab: int, name: str) -> None:
    assert id_dtype(vocab).name == name


# --- what is refused ---


@pytest.mark.parametrize("ids", [[0, 65536], [-1, 5], [0.5]])
def test_ids_that_do_not_fit_are_refused_and_leave_nothing(tmp_path: Path, ids: list[float]) -> None:
    with pytest.raises(DataError, match="does not fit uint16"):
        write(tmp_path / "x", [[1, 2], ids])
    assert content(tmp_path) == {}


@pytest.mark.parametrize("dtype", ["u4", "f2", "S3"])
def test_a_type_that_the_format_lacks_is_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(DataError, match="the format has no "):
        IndexedDatasetWriter(tmp_path / "x", dtype)
    assert content(tmp_path) == {}


@pytest.mark.parametrize(
    ("ids", "lengths", "error", "message"),
    [
        ([1, 65536], [1, 1], DataError, "65536 does not fit uint16"),
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


def test_a_pair_that_changes_while_it_is_copied_is_refused(small: Path, tmp_path: Path) -> None:
    data = IndexedDataset(small)
    with open(f"{small}.bin", "ab") as file:
        file.write(b"xx")
    message = r"small\.bin: 42 bytes were read, expected 40"
    with pytest.raises(DataError, match=message), IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_pair(data)
    assert not (tmp_path / "x.bin").exists()


# --- whole or absent ---


def test_an_interrupted_writer_leaves_the_old_pair_alone(small: Path) -> None:
    before = content(small.parent)

    def interrupted() -> Iterator[list[int]]:
        yield [9, 9, 9]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(small, interrupted())
    assert content(small.parent) == before


def killed(prefix: Path) -> None:
    """Write ``prefix`` in a process that is killed before it is whole."""
    if (child := os.fork()) == 0:
        with IndexedDatasetWriter(prefix, "u2") as writer:
            writer.add_document(range(1000))
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_killed_writer_leaves_no_pair_and_its_leftovers_can_be_removed(tmp_path: Path) -> None:
    killed(tmp_path / "x")
    (left,) = tmp_path.iterdir()
    assert left.name.split(".")[1::2] == ["bin", "part"]
    with pytest.raises(DataError, match="No such file"):
        IndexedDataset(tmp_path / "x")
    process = left.name.split(".")[-2]
    (tmp_path / f"x.idx.{process}.part").touch()
    assert remove_unfinished_files(tmp_path / "other") == []
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        assert sorted(remove_unfinished_files(tmp_path / "x")) == [left, tmp_path / f"x.idx.{process}.part"]
        writer.add_document([7])
        assert remove_unfinished_files(tmp_path / "x") == []
    assert IndexedDataset(tmp_path / "x").num_tokens == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_writers_of_one_process_number_write_into_files_of_their_own(tmp_path: Path) -> None:
    """As two containers do, whose first processes have the same number."""
    with (
        IndexedDatasetWriter(tmp_path / "x", np.uint16) as one,
        IndexedDatasetWriter(tmp_path / "x", np.uint16) as other,
    ):
        one.add_document([1])
        other.add_document([2, 3])
        assert len(os.listdir(tmp_path)) == 2
    assert IndexedDataset(tmp_path / "x")[0].tolist() == [1]


def write_both(folder: Path, token: int, *beside: str) -> None:
    """Two pairs at once."""
    first, second = (
        IndexedDatasetWriter(folder / name, np.uint16, dict.fromkeys(beside, bytes([token]))) for name in "ab"
    )
    with first as a, second as b:
        for writer in (a, b):
            writer.add_document([token])
        publish_all([a, b])
        assert [IndexedDataset(folder / name)[0].tolist() for name in "ab"] == [[token], [token]]


@pytest.mark.parametrize("obstacle", ["b.bin", "b.note", "b.beside/old"])
def test_pairs_published_together_are_all_old_where_one_cannot_be_written(tmp_path: Path, obstacle: str) -> None:
    write_both(tmp_path, 1, "note", "beside/note")
    (tmp_path / obstacle).unlink(missing_ok=True)
    (tmp_path / obstacle).mkdir()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(DataError, match="is a folder, but a file must be written there"):
        write_both(tmp_path, 2, "note", "beside/note")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    (tmp_path / obstacle).rmdir()
    write_both(tmp_path, 3, "note", "beside/note")


def test_while_names_change_no_pair_has_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail at each rename in turn: at no time is one pair new and the other old."""
    rename = os.rename
    for n, whole in enumerate([0, 0, 0, 1]):
        for name in ("a", "b"):
            write(tmp_path / name, [[1]])
        calls = iter(range(9))

        def stop(source: str, target: str, calls: Iterator[int] = calls, last: int = n) -> None:
            if next(calls) == last:
                raise OSError("no space left")
            rename(source, target)

        monkeypatch.setattr(os, "rename", stop)
        with pytest.raises(OSError, match="no space left"):
            write_both(tmp_path, 2)
        monkeypatch.setattr(os, "rename", rename)
        indexes = sorted(tmp_path.glob("*.idx"))
        assert len(indexes) == whole
        assert all(IndexedDataset(path.with_suffix(""))[0].tolist() == [2] for path in indexes)
        assert not list(tmp_path.glob("*.part"))


def test_a_folder_beside_the_pair_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_with(prefix: Path, *names: str) -> None:
        write(prefix, [[7]], extra_files={f"beside/{name}": name.encode() for name in names})

    write_with(tmp_path / "x", "a", "b")
    write_with(tmp_path / "x", "b", "c")
    assert content(tmp_path / "x.beside") == {"b": b"b", "c": b"c"}
    assert len(IndexedDataset(tmp_path / "x")) == 1

    def full(*paths: str) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="no space left"):
        write_with(tmp_path / "y", "a", "b")
    assert sorted(os.listdir(tmp_path)) == ["x.beside", "x.bin", "x.idx"]


@pytest.mark.parametrize("file", ["_bin", "_lengths", "_boundaries"])
def test_a_full_disk_leaves_the_old_pair_alone(small: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    before = content(small.parent)

    class Full(io.BufferedWriter):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "no space left")

        def seek(self, target: int, whence: int = 0) -> int:
            raise OSError(errno.ENOSPC, "no space left")

    def write_to_a_full_disk() -> None:
        with IndexedDatasetWriter(small, np.uint16) as writer:
            writer.add_document([7] * 50)
            getattr(writer, file).close()
            monkeypatch.setattr(writer, file, Full(io.FileIO(os.devnull, "wb")))

    with pytest.raises(OSError, match="no space left"):
        write_to_a_full_disk()
    assert content(small.parent) == before
