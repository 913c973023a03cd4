"""Text files as blocks and documents: in a fixed order, whole, and with a word where something is wrong."""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import tracemalloc
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.errors import DataError
from megatron.data.preprocess import corpus
from megatron.data.preprocess.corpus import (
    BadDocument,
    BadDocumentError,
    BadDocumentReport,
    Block,
    FileBlock,
    LineBlock,
    TextDocument,
    load_block,
    parse_record,
    parse_valid_lines,
    read_block,
    read_documents,
    split_into_blocks,
    split_lines,
    split_lines_file,
    text_of,
)
from megatron.data.preprocess.files import find_text_files
from megatron.data.preprocess.streams import COMPRESSION_SUFFIXES, DamagedStreamError, decompress
from tests.kit.users import NOBODY, as_user, needs_root, public_folder
from tests.unit.data.pairs import COMPRESS


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.py", "a/z.py", "a/y.txt", "skip/x.py", "a/skip/w.py", "a.py", "c.pyc", "a-b/d.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.py").mkdir()
    return tmp_path


def names(
    root: Path, inputs: Sequence[str], suffixes: Sequence[str] = (".py",), exclude: Sequence[str] = ()
) -> list[str]:
    return [f.relative_to(root).as_posix() for f in find_text_files(inputs, suffixes, exclude)]


def test_a_folder_gives_its_files_sorted_by_path(tree: Path) -> None:
    expected = ["a-b/d.py", "a.py", "a/skip/w.py", "a/z.py", "b.py", "skip/x.py"]
    assert names(tree, [str(tree)]) == expected
    assert names(tree, [str(tree)], (".py", ".txt"), ("skip", "a-b")) == ["a.py", "a/y.txt", "a/z.py", "b.py"]
    assert names(tree, [str(tree)], (".py",), ("skip", "z.py", "a.py")) == ["a-b/d.py", "b.py"]


def test_a_link_to_a_file_of_the_folder_is_passed_over(tree: Path) -> None:
    """As Debian's Python has one among its sources; whichever name comes first."""
    expected = names(tree, [str(tree)])
    (tree / "0.py").symlink_to(tree / "a" / "z.py")
    (tree / "z.py").symlink_to("a.py")
    assert names(tree, [str(tree)]) == expected
    outside = tree.with_name("outside")
    outside.write_text("x")
    for name in ("p.py", "o.py"):
        (tree / name).symlink_to(outside)
    found = find_text_files([str(tree)], [".py"], [], follow_links=True)
    assert [file.relative_to(tree).as_posix() for file in found] == sorted([*expected, "o.py"])


@pytest.mark.parametrize(("name", "link"), [("leak.py", "leak.py"), ("sub/x.py", "sub")])
@pytest.mark.parametrize("recursive", ["", "**/*.py", None])
def test_links_out_of_a_folder_or_pattern_are_not_read(
    tree: Path, tmp_path_factory: pytest.TempPathFactory, name: str, link: str, recursive: str | None
) -> None:
    """A corpus of unknown origin may have links to any file or folder of the user who reads it."""
    private = tmp_path_factory.mktemp("private")
    (private / "x.py").write_text("password")
    (tree / link).symlink_to(private if link == "sub" else private / "x.py")
    given, notes = str(tree / (f"{'*/' * name.count('/')}*.py" if recursive is None else recursive)), list[str]()
    assert tree / name not in find_text_files([given], [".py"], [], note=notes.append)
    (note,) = notes
    assert str(tree / link) in note
    assert f" -> {private}" in note
    assert "(outside of it)" in note
    assert "--follow-links" in note
    assert tree / name in find_text_files([given], [".py"], [], follow_links=True)


def test_a_link_that_is_named_is_read(tree: Path) -> None:
    tree.with_name("secret").write_text("password")
    (tree / "leak.py").symlink_to("../secret")
    assert find_text_files([str(tree / "leak.py")], [".py"], [], note=pytest.fail) == [tree / "leak.py"]
    with pytest.raises(DataError, match=r"leak\.py -> .*\n  fix: --follow-links$"):
        find_text_files([str(tree / "leak*")], [".py"], [])


@pytest.mark.parametrize("given", ["", "**/*.py"])
def test_unreadable_files_are_counted_in_one_note(tree: Path, given: str) -> None:
    expected = names(tree, [str(tree)])
    (tree / "gone.py").symlink_to("/nowhere/gone.py")
    (tree / "round.py").symlink_to("round.py")
    os.mkfifo(tree / "pipe.py")
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.path.relpath(tree / "socket.py"))
    (tree / "zero.py").symlink_to("/dev/zero")
    for follow in (False, True):
        notes: list[str] = []
        found = find_text_files([str(tree / given)], [".py"], [], follow, notes.append)
        assert [file.relative_to(tree).as_posix() for file in found] == expected
        (note,) = notes
        assert ": 6 not read: " in note
        assert "dangling.py (No such file or directory)" in note
        assert "and 2 more" in note
        assert ("--follow-links" in note) is False
    server.close()


@needs_root
def test_files_of_another_user_are_skipped() -> None:
    """As root's files are on a share that squashes root, or lost+found beside a corpus."""
    with public_folder() as folder:
        for name in ("a.txt", "closed.txt", "lost+found/b.txt", "sub/c.txt"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("x")
        (folder / "closed.txt").chmod(0o600)
        (folder / "lost+found").chmod(0o700)
        (folder / "sub").chmod(0o755)

        def find(given: str) -> tuple[list[Path], list[str]]:
            notes: list[str] = []
            return find_text_files([given], [".txt"], [], note=notes.append), notes

        found, (note,) = as_user(NOBODY, partial(find, str(folder)))
        assert found == [folder / "a.txt", folder / "sub" / "c.txt"]
        assert ": 2 not read: " in note
        assert f"{folder / 'closed.txt'} (Permission denied)" in note
        assert f"{folder / 'lost+found'} (Permission denied)" in note
        folder.chmod(0o700)
        with pytest.raises(PermissionError):
            as_user(NOBODY, partial(find, str(folder)))


@pytest.mark.parametrize("pattern", ["**", "**/*", "a/**/*.py", "**/skip/*.py", "*/**/*.py", "**/**/[ab].py", "**/.*"])
def test_a_recursive_pattern_matches_like_glob(tree: Path, pattern: str) -> None:
    for name in (".hidden.py", ".git/a.py", "a/.x"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("")
    expected = {path for path in glob.glob(str(tree / pattern), recursive=True) if os.path.isfile(path)}
    assert {*map(str, find_text_files([str(tree / pattern)], [".py"], []))} == expected


def test_links_in_a_circle_end(tree: Path) -> None:
    expected = names(tree, [str(tree)])
    (tree / "a" / "up").symlink_to("..")
    (tree / "again").symlink_to("a")
    (tree / "parent").symlink_to("../" + tree.name)
    assert names(tree, [str(tree)]) == names(tree, [str(tree / "**" / "*.py")]) == expected
    assert len(find_text_files([str(tree)], [".py"], [], follow_links=True)) == len(expected)


def test_links_into_the_cache_of_the_hub_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "datasets--org--name"
    data, blobs = repository / "snapshots" / "0123" / "data", repository / "blobs"
    data.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abcd").write_text('{"text": "a"}\n')
    (data / "a.jsonl").symlink_to("../../../blobs/abcd")
    for folder in (data, data.parent):
        assert find_text_files([str(folder)], [".jsonl"], []) == [data / "a.jsonl"]
    (data / "b.jsonl").symlink_to("../../../../secret.jsonl")
    (tmp_path / "secret.jsonl").write_text("")
    notes: list[str] = []
    assert find_text_files([str(data)], [".jsonl"], [], note=notes.append) == [data / "a.jsonl"]
    assert "b.jsonl -> ../../../../secret.jsonl" in notes[0]


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/secret.arrow", "..", "a/b.arrow", 7, None])
def test_a_saved_dataset_names_no_files_elsewhere(tmp_path: Path, name: object) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(DataError, match=r"state\.json is not a file of a dataset"):
        find_text_files([str(tmp_path)], [".arrow"], [])
    for content in ("[]", "{}", "{", '{"_data_files": 5}', '{"_data_files": [[]]}'):
        (tmp_path / "state.json").write_text(content)
        with pytest.raises(DataError, match=r"state\.json is not a file of a dataset"):
            find_text_files([str(tmp_path)], [".arrow"], [])


def test_files_and_patterns_keep_their_order(tree: Path) -> None:
    given = [str(tree / "b.py"), str(tree / "a*.py"), str(tree / "**" / "y.txt")]
    assert names(tree, given) == ["b.py", "a.py", "a/y.txt"]


@pytest.mark.parametrize(
    ("name", "message"), [("none.txt", "there is no such file"), ("a-b", "no file below it ends in .md")]
)
def test_an_input_without_files_is_refused(tree: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=f"--input .*{name}: {message}"):
        find_text_files([str(tree / "b.py"), str(tree / name)], (".md",), ())


def test_a_file_without_a_document_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n \n")
    with pytest.raises(DataError, match=r"x\.jsonl has no documents\n  fix: .*--exclude x\.jsonl"):
        list(read_documents([path], ["text"]))


def test_a_mark_of_utf_8_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes('{"text": "é"}\n'.encode("utf-8-sig"))
    assert [d.texts for d in read_documents([tmp_path / "x.jsonl"], ["text"])] == [("é",)]


def test_a_folder_with_a_file_and_its_copy_is_refused(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl.gz"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.jsonl\.gz lies beside .*a\.jsonl: the same documents would be read twice"):
        find_text_files([str(tmp_path)], [".jsonl"], [])
    assert names(tmp_path, [str(tmp_path)], [".jsonl"], ["a.jsonl.gz"]) == ["a.jsonl"]
    both = [str(tmp_path / "a.jsonl.gz"), str(tmp_path / "a.jsonl")]
    assert names(tmp_path, both, [".jsonl"]) == ["a.jsonl.gz", "a.jsonl"]


@pytest.mark.parametrize("name", ["x.zip", "x.7z", "x.jsonl.zstd", "x.jsonl.Z"])
def test_other_formats_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=f"{name}: .* files are not supported\n  fix: "):
        find_text_files([str(tmp_path / name)], [".jsonl"], [])


def test_the_name_of_a_file_is_no_pattern(tmp_path: Path) -> None:
    for name in ("data[1].jsonl", "data1.jsonl"):
        (tmp_path / name).touch()
    assert find_text_files([str(tmp_path / "data[1].jsonl")], [], []) == [tmp_path / "data[1].jsonl"]


def test_a_file_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    file.touch()
    for inputs in ([file, file], [file, tmp_path], [tmp_path / "f*", tmp_path / "." / "f.jsonl"]):
        with pytest.raises(DataError, match=r"f\.jsonl is given twice: its documents would be read twice"):
            find_text_files([str(name) for name in inputs], [".jsonl"], [])
    (tmp_path / "other").symlink_to(file)
    with pytest.raises(DataError, match=r"other is .*f\.jsonl, which is given too"):
        find_text_files([str(file), str(tmp_path / "other")], [], [])


@pytest.mark.parametrize("name", ["a.ndjson", "a.JSONL", "a.jsonl.GZ"])
def test_lines_are_lines_however_their_file_is_called(tmp_path: Path, name: str) -> None:
    content = b'{"text": "a"}\n{"text": "b"}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("GZ") else content)
    (file,) = find_text_files([str(tmp_path)], [".jsonl", ".json", ".ndjson"], [])
    assert [document.texts for document in read_documents([file], ["text"])] == [("a",), ("b",)]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    content=st.lists(st.sampled_from([b"a", b"bb", b"\n", b"\n", b"c" * 40]), max_size=40).map(b"".join),
    block_bytes=st.integers(1, 60),
    suffix=st.sampled_from(["", ".gz", ".zst"]),
)
def test_blocks_are_the_file(content: bytes, block_bytes: int, suffix: str) -> None:
    stored = COMPRESS[suffix](content) if suffix else content
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"x.jsonl{suffix}"
        file.write_bytes(stored)
        blocks = list(split_lines_file(file, block_bytes))
        read = [block.read() for block in blocks]
    assert b"".join(read) == content
    assert all(part.endswith(b"\n") for part in read[:-1])
    assert [block.first for block in blocks] == [True] + [False] * (len(blocks) - 1)
    assert [block.last for block in blocks] == [False] * (len(blocks) - 1) + [True]
    assert sum(block.stored for block in blocks) == len(stored)
    if not suffix:  # as short as lines allow
        assert all(part.count(b"\n", block_bytes - 1, -1) == 0 for part in read)


def test_a_long_line_is_not_read_whole_in_search_of_its_end(tmp_path: Path) -> None:
    file, size = tmp_path / "x.jsonl", 8 << 20
    with file.open("wb") as stream:
        stream.truncate(size)
        stream.seek(size - 3)
        stream.write(b"\na\n")
    tracemalloc.start()
    try:
        blocks = list(split_lines_file(file, 10))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert [block.content for block in blocks] == [range(size - 2), range(size - 2, size)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 60), max_size=12),
    ended=st.booleans(),
    block_bytes=st.integers(1, 60),
    limit=st.integers(1, 50),
    suffix=st.sampled_from(["", ".gz", ".zst", ".bz2", ".xz"]),
)
def test_lines_that_are_too_long_are_invalid_and_the_others_keep_their_numbers(
    sizes: list[int], ended: bool, block_bytes: int, limit: int, suffix: str
) -> None:
    lines = [json.dumps({"text": "x" * max(0, size - 12)}).encode() if size >= 12 else b" " * size for size in sizes]
    content = b"\n".join(lines) + b"\n" * ended
    good = [(n, len(line)) for n, line in enumerate(lines, 1) if line.strip() and len(line) <= limit]
    bad = [n for n, line in enumerate(lines, 1) if len(line) > limit]
    found, refused, before = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"x.jsonl{suffix}"
        file.write_bytes(COMPRESS[suffix](content) if suffix else content)
        blocks = list(split_into_blocks([file], ["text"], block_bytes, limit))
        for unread in blocks:
            block, count = load_block(unread)
            for document in read_block(block, ["text"]):
                if isinstance(document, BadDocument):
                    assert document.seen == f" is longer than {limit:,} bytes"
                    refused.append(before + document.line)
                else:
                    found.append((before + document.place[1], document.num_bytes))
            before += count
        assert sum(block.stored for block in blocks) == file.stat().st_size
    assert [block.last for block in blocks if isinstance(block, LineBlock)] == [False] * (len(blocks) - 1) + [True]
    assert (found, refused) == (good, bad)


@pytest.mark.parametrize("suffix", [*COMPRESSION_SUFFIXES, ""])
@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_a_small_file_that_holds_a_long_line_takes_little_memory(tmp_path: Path, kind: str, suffix: str) -> None:
    file, size = tmp_path / f"x.{kind}{suffix}", 100 << 20
    if suffix:
        file.write_bytes(COMPRESS[suffix](bytes(size)) + COMPRESS[suffix](b'\n{"text": "a"}\n'))
    else:
        with file.open("wb") as stream:
            stream.truncate(size)
            stream.seek(size)
            stream.write(b'\n{"text": "a"}\n')
    skipped: list[str] = []
    tracemalloc.start()
    try:
        report = BadDocumentReport(skip=True, message=skipped.append)
        documents = list(read_documents([file], ["text"], report, max_line_bytes=1 << 20))
        assert tracemalloc.get_traced_memory()[1] < 70 << 20  # of which the pieces of a decompressor are 16 MiB
    finally:
        tracemalloc.stop()
    assert [document.texts for document in documents] == ([("a",)] if kind == "jsonl" else [])
    where = f"{file}:1" if kind == "jsonl" else file
    assert skipped == [f"passed over: {where} is longer than 1,048,576 bytes"]
    with pytest.raises(DataError, match=r"is longer than 1,048,576 bytes\n  fix: --max-line-bytes 2097152 \| fix or "):
        list(read_documents([file], ["text"], max_line_bytes=1 << 20))


def write(folder: Path, **files: bytes) -> list[Path]:
    paths = [folder / name.replace("_", ".") for name in files]
    for path, content in zip(paths, files.values()):
        path.write_bytes(content)
    return paths


def test_small_texts_share_a_block_and_the_order_is_kept(tmp_path: Path) -> None:
    files = write(tmp_path, a_txt=b"a" * 6, b_txt=b"b" * 6, c_txt=b"c", d_jsonl=b"{}\n", e_txt=b"e", f_md=b"f" * 99)
    blocks: list[Block] = list(split_into_blocks(files, ["text"], 10))
    a, b, c, d, e, f = files
    assert blocks == [
        FileBlock((a, b), 12),
        FileBlock((c,), 1),
        LineBlock(d, range(3), 3, first=True, last=True),
        FileBlock((e, f), 100),
    ]


def test_a_file_that_shrinks_is_reported(tmp_path: Path) -> None:
    (file,) = write(tmp_path, x_jsonl=b'{"text": "a"}\n' * 10)
    (block,) = split_lines_file(file)
    file.write_bytes(b'{"text": "a"}\n')
    with pytest.raises(DataError, match="became shorter while it was read"):
        block.read()


TEXT = b"".join(b"line %d of a text that compresses, %d\n" % (i, i * i) for i in range(5_000))


def unpacked(suffix: str, content: bytes) -> bytes:
    return b"".join(decompress(Path(f"x{suffix}"), io.BytesIO(content)))


@pytest.mark.parametrize("suffix", COMPRESSION_SUFFIXES)
def test_streams_back_to_back_are_one_text(suffix: str) -> None:
    stream = COMPRESS[suffix](TEXT)
    assert unpacked(suffix, b"") == b""
    assert unpacked(suffix, stream) == TEXT
    assert unpacked(suffix, stream + COMPRESS[suffix](b"") + COMPRESS[suffix](b"end")) == TEXT + b"end"


def test_padding_is_no_stream() -> None:
    stream = gzip.compress(TEXT)
    assert unpacked(".gz", stream + bytes(100)) == TEXT
    assert unpacked(".gz", stream + bytes(100_000) + stream) == TEXT + TEXT


@pytest.mark.parametrize("suffix", COMPRESSION_SUFFIXES)
def test_a_cut_file_is_reported_after_its_documents(suffix: str) -> None:
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


@pytest.mark.parametrize("ended", [False, True])
def test_a_line_that_is_cut_is_no_document(tmp_path: Path, ended: bool) -> None:
    packer, (file,) = zlib.compressobj(wbits=31), write(tmp_path, x_jsonl_gz=b"")
    text = b'{"text": "a"}\n{"text": "b' if not ended else b'{"text": "a"}\n'
    file.write_bytes(packer.compress(text) + packer.flush(zlib.Z_SYNC_FLUSH))
    report = BadDocumentReport(skip=True, message=lambda text: None)
    assert [document.texts for document in read_documents([file], ["text"], report)] == [("a",)]
    assert report.count == 1


@pytest.mark.parametrize("suffix", COMPRESSION_SUFFIXES)
def test_a_damaged_or_other_file_is_reported(suffix: str) -> None:
    stream = bytearray(COMPRESS[suffix](TEXT))
    stream[len(stream) // 2] ^= 0xFF
    for content in (bytes(stream), b"plain text", COMPRESS[suffix](TEXT) + b"plain text"):
        with pytest.raises(DamagedStreamError, match=f"is not valid {suffix} from here on|middle of a {suffix} stream"):
            unpacked(suffix, content)


@pytest.mark.parametrize("suffix", COMPRESSION_SUFFIXES)
def test_pieces_are_small_however_well_a_text_compresses(suffix: str) -> None:
    size = 40_000_000
    pieces = [len(piece) for piece in decompress(Path(f"x{suffix}"), io.BytesIO(COMPRESS[suffix](bytes(size))))]
    assert sum(pieces) == size
    assert max(pieces) <= 17_000_000


FILE = Path("x.jsonl")


def parse_line(line: bytes, keys: Sequence[str], file: Path) -> tuple[str, ...]:
    record = parse_record(line, file)
    return tuple(text_of(record, key) for key in keys)


@pytest.fixture(params=["orjson", "json"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fast reader of JSON, and a machine without it."""
    if request.param == "json":
        monkeypatch.setitem(sys.modules, "orjson", None)
    corpus._reader.cache_clear()
    yield
    corpus._reader.cache_clear()


def carefully(content: bytes, keys: tuple[str, ...]) -> list[list[bytes]] | None:
    try:
        rows = [parse_line(line, keys, FILE) for line in split_lines(content)]
    except BadDocumentError:
        return None
    return [[row[i].encode() for row in rows] for i in range(len(keys))]


odd_characters = st.sampled_from('ab \u00e9\u6771\U0001f469\0\\"\n\r\u2028\ufeff')
texts = st.text(odd_characters, max_size=20)
values = texts | st.none() | st.integers() | st.lists(texts, max_size=2) | st.just("\ud800")
good_line = st.builds(lambda a, b, ascii: json.dumps({"a": a, "b": b}, ensure_ascii=ascii), texts, texts, st.booleans())
any_line = (
    good_line
    | st.builds(lambda value: json.dumps({"a": value, "b": "x"}), values)
    | st.builds(lambda value: json.dumps(value), values)
    | st.sampled_from(["", " ", "{", '{"a": "x"}', '{"a": NaN, "b": ""}', '{"a":"1","b":"2"},{"a":"3","b":"4"}', "[]"])
)


@pytest.mark.usefixtures("reader")
def test_the_fast_path_matches_the_careful_path() -> None:
    @settings(max_examples=50, deadline=None, derandomize=True)
    @given(st.lists(any_line, max_size=4), st.booleans(), st.sampled_from([("a",), ("b", "a")]))
    def check(lines: list[str], ended: bool, keys: tuple[str, ...]) -> None:
        content = "\n".join(lines).encode() + b"\n" * ended
        fast, careful = parse_valid_lines(content, keys), carefully(content, keys)
        assert fast in (None, careful)

    @settings(max_examples=30, deadline=None, derandomize=True)
    @given(st.lists(good_line.filter(lambda line: "\\u0000" not in line), max_size=4))
    def check_good(lines: list[str]) -> None:
        content = "\n".join(lines).encode()
        assert parse_valid_lines(content, ("a",)) == carefully(content, ("a",)) is not None

    check()
    check_good()


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', " is not JSON"),
        (b'{"text": "a\0b"}', " is not JSON"),
        (b'["text"]', " is an array, not an object"),
        (b"null", " is null, not an object"),
        (b'{"txt": "a", "id": 1}', " has no key 'text'; its keys: txt, id"),
        (b'{"text": null}', ": 'text' is null, not a string"),
        (b'{"text": 7}', ": 'text' is a number, not a string"),
        (b'{"text": true}', ": 'text' is a boolean, not a string"),
        (b'{"text": "ab\\u0000"}', ": 'text' is not text: character 2 is NUL"),
        (b'{"text": "a\\udc00"}', ": 'text' is not Unicode: character 1 is an unpaired surrogate"),
        (b'{"text": "caf\xe9"}', " is not UTF-8 text"),
        (b"[" * 100_000, " is nested too deeply"),
    ],
)
def test_a_bad_line_is_named(line: bytes, message: str) -> None:
    with pytest.raises(BadDocumentError) as caught:
        parse_line(line, ("text",), FILE)
    assert caught.value.seen.startswith(message)
    assert parse_valid_lines(line, ("text",)) is None


def test_numbers_that_only_some_readers_take_are_no_obstacle() -> None:
    line = b'{"n": NaN, "m": 123456789012345678901234567890, "text": "t"}'
    assert parse_line(line, ("text",), FILE) == ("t",)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
records = st.lists(
    st.builds(lambda text, more: {"text": text, "more": more}, st.text(), json_values), min_size=1, max_size=5
)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    records,
    st.sampled_from([None, 1, 4]),
    st.booleans(),
    st.sampled_from(["", "\ufeff", "\n \r\n"]),
    st.integers(1, 60),
)
def test_arrays_and_objects_over_lines_are_read_as_lines_are(
    values: list[dict[str, object]], indent: int | None, array: bool, before: str, block_bytes: int
) -> None:
    def read(name: str, text: str) -> list[TextDocument | BadDocument]:
        file = Path(folder, name)
        file.write_bytes((gzip.compress if name.endswith("gz") else bytes)(text.encode()))
        blocks = [load_block(block)[0] for block in split_into_blocks([file], ["text"], block_bytes)]
        assert [block.first for block in blocks] == [True, *[False] * (len(blocks) - 1)]
        assert sum(block.stored for block in blocks) == file.stat().st_size
        return [document for block in blocks for document in read_block(block, ["text"])]

    def texts(documents: list[TextDocument | BadDocument]) -> list[object]:
        return [document.texts if isinstance(document, TextDocument) else document.seen for document in documents]

    lines = "".join(json.dumps(value) + "\n" for value in values)
    whole = json.dumps(values, indent=indent, ensure_ascii=bool(block_bytes % 2))
    spread = "\n".join(json.dumps(value, indent=indent or 2) for value in values)
    with tempfile.TemporaryDirectory() as folder:
        expected = texts(read("x.jsonl", lines))
        assert texts(read("y.json", before + (whole if array else spread))) == expected
        assert texts(read("y.json.gz", before + (whole if array else spread))) == expected


@pytest.mark.parametrize(
    ("text", "good", "message"),
    [
        ('[{"text": "a"}, {"text": "b"}', 2, ":3 is not JSON from here on: the array does not end"),
        ('[{"text": "a"}, {"text" "b"}]', 1, ":2 is not JSON from here on: "),
        ('{\n"text": "a"}\n{\n"text": ', 1, ":2 is not JSON from here on: "),
        ('[{"text": "a"}, ' + "[" * 99_999, 1, ":2 is not JSON from here on: "),
        ('[{"text": "a"}, 7]', 1, ":2 is a number, not an object"),
    ],
)
def test_a_bad_value_of_an_array_is_named(tmp_path: Path, text: str, good: int, message: str) -> None:
    (tmp_path / "x.json").write_text(text)
    found = read_documents([tmp_path / "x.json"], ["text"], BadDocumentReport(skip=True, message=lambda text: None))
    assert len(list(found)) == good
    with pytest.raises(DataError) as caught:
        list(read_documents([tmp_path / "x.json"], ["text"]))
    assert caught.value.seen.startswith(f"{tmp_path / 'x.json'}{message}")
    assert ("--on-bad-line skip" in caught.value.fixes) is (" from here on" not in message)


def test_a_long_value_takes_bounded_time_and_memory(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"text": "' + "x" * 3_000_000)
    with pytest.raises(DataError, match="longer than 100,000 bytes"):
        list(read_documents([tmp_path / "x.json"], ["text"], max_line_bytes=100_000))


LINE = '{"text": "caf\u00e9"}'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a b.jsonl", LINE.encode("utf-16")),
        ("a b.jsonl", LINE.encode("latin-1")),
        ("a b.txt", LINE.encode("utf-16")),
        ("a b.jsonl.zstd", zstandard.compress(LINE.encode())),
    ],
)
def test_a_command_that_is_a_fix_mends_the_file(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"not UTF-8 text|\.zstd files are not supported") as caught:
        list(read_documents(find_text_files([str(tmp_path / name)], (), ()), ["text"]))
    subprocess.run(caught.value.fixes[0], shell=True, check=True, cwd=tmp_path)
    (new,) = [path for path in tmp_path.iterdir() if path.name != name]
    (document,) = read_documents([new], ["text"])
    assert document.texts == (LINE.encode() if name.endswith(".txt") else "caf\u00e9",)
