"""Text files as documents, in a fixed order."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import zstandard

from megatron.data.errors import DataError
from megatron.data.preprocess.corpus import find_text_files, read_documents

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


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
    assert names(tree, [str(tree)]) == sorted([*expected, "o.py"])


def test_the_order_of_the_file_system_does_not_matter(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = names(tree, [str(tree)])
    scandir = os.scandir

    class Backwards:
        def __init__(self, path: str) -> None:
            self.entries = sorted(scandir(path), key=lambda e: e.name, reverse=True)

        def __enter__(self) -> Backwards:
            return self

        def __exit__(self, *_: object) -> None: ...

        def close(self) -> None: ...

        def __iter__(self) -> Backwards:
            return self

        def __next__(self) -> os.DirEntry[str]:
            if not self.entries:
                raise StopIteration
            return self.entries.pop(0)

    monkeypatch.setattr(os, "scandir", Backwards)
    assert names(tree, [str(tree)]) == forwards


def test_files_and_patterns_keep_their_order(tree: Path) -> None:
    given = [str(tree / "b.py"), str(tree / "a*.py"), str(tree / "**" / "y.txt")]
    assert names(tree, given) == ["b.py", "a.py", "a/y.txt"]


def test_a_name_with_pattern_characters_is_still_a_file(tmp_path: Path) -> None:
    (tmp_path / "data[1].txt").write_text("x")
    assert names(tmp_path, [str(tmp_path / "data[1].txt")]) == ["data[1].txt"]


@pytest.mark.parametrize(
    ("name", "message"), [("none.txt", "there is no such file"), ("a-b", "no file below it ends in .md")]
)
def test_an_input_without_files_is_refused(tree: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=f"--input .*{name}: {message}"):
        find_text_files([str(tree / "b.py"), str(tree / name)], (".md",), ())


def test_a_plain_file_is_one_document_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_bytes(b"# caf\xc3\xa9\r\n")
    (document,) = read_documents([path], ["text"])
    assert document == ((b"# caf\xc3\xa9\r\n",), (path, 0), 9)
    with pytest.raises(DataError, match="plain text without the keys text, url"):
        list(read_documents([path], ["text", "url"]))


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    records = [{"text": "één", "url": "u1"}, {"url": "", "text": ""}]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    documents = list(read_documents([path], ["url", "text"]))
    assert [d.texts for d in documents] == [("u1", "één"), ("", "")]
    assert [d.place for d in documents] == [(path, 1), (path, 2)]
    assert sum(d.num_bytes + 1 for d in documents) == path.stat().st_size


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "is not JSON"),
        (b'["text"]', "is an array, not an object"),
        (b"null", "is null, not an object"),
        (b'{"txt": "a", "id": 1}', "has no key 'text'; its keys: txt, id"),
        (b'{"text": null}', "'text' is null, not a string"),
        (b'{"text": 7}', "'text' is a number, not a string"),
        (b'{"text": true}', "'text' is a boolean, not a string"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError) as caught:
        list(read_documents([path], ["text"]))
    assert str(caught.value).startswith(f"{path}:2")
    assert message in str(caught.value)


def test_blank_lines_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\n{"text": "a"}\n\n  \r\n{"text": ""}\n\n')
    assert [(d.texts, d.place) for d in read_documents([path], ["text"])] == [
        (("a",), (path, 2)),
        (("",), (path, 5)),
    ]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_a_document_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.jsonl has no documents\n  fix: .*--exclude x\.jsonl"):
        list(read_documents([path], ["text"]))


@pytest.mark.parametrize(
    ("name", "encoding"), [("a b.jsonl", "LATIN1"), ("a b.jsonl", "UTF-16"), ("a b.txt", "UTF-16")]
)
def test_the_fix_for_another_encoding_works(tmp_path: Path, name: str, encoding: str) -> None:
    path = tmp_path / name
    record = json.dumps({"text": "café"}, ensure_ascii=False)
    path.write_bytes(record.encode(encoding))
    with pytest.raises(DataError, match="UTF-8 text") as caught:
        list(read_documents([path], ["text"]))
    subprocess.run(["sh", "-c", str(caught.value).split("fix: ")[1].split(" | ")[0]], check=True)
    (document,) = read_documents([path.with_stem("a b.utf8")], ["text"])
    assert document.texts == ("café" if name.endswith(".jsonl") else record.encode(),)


def test_what_is_passed_over_is_told_and_the_rest_read(tmp_path: Path) -> None:
    for name, content in {
        "a.jsonl": b'{"text": "1"}\nno\n\n{"text": 2}\n{"text": "\\ud800"}\n{"text": "3"}',
        "b.txt": b"caf\xe9",
        "c.txt": b"good",
        "d.jsonl": b"",
        "e.jsonl.gz": gzip.compress(b'{"text": "4"}\n{"text": "5"}\n')[:-9],
    }.items():
        (tmp_path / name).write_bytes(content)
    printed: list[DataError] = []
    files = sorted(tmp_path.iterdir())
    texts = [d.texts[0] for d in read_documents(files, ["text"], printed.append)]
    assert [text for text in texts if text not in ("4", "5")] == ["1", "3", b"good"]
    assert [error.seen.removeprefix(f"{tmp_path}/").split(" ")[0].rstrip(":") for error in printed] == [
        "a.jsonl:2",
        "a.jsonl:4",
        "a.jsonl:5",
        "b.txt",
        "d.jsonl",
        f"e.jsonl.gz:{len(texts) - 2}",
    ]
    assert all("--on-bad-line skip" in error.fixes for error in printed)


def test_a_mark_of_utf_8_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes('{"text": "é"}\n'.encode("utf-8-sig"))
    assert [d.texts for d in read_documents([tmp_path / "x.jsonl"], ["text"])] == [("é",)]


def test_a_binary_file_is_not_taken_for_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"PK\3\4\0\0")
    with pytest.raises(DataError, match=r"x\.txt is not text: byte 4 is NUL\n  fix: .*--exclude x\.txt"):
        list(read_documents([tmp_path / "x.txt"], ["text"]))


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz"])
def test_compressed_files_are_read_as_what_they_hold(tmp_path: Path, suffix: str) -> None:
    lines, text = tmp_path / f"x.jsonl{suffix}", tmp_path / f"y.txt{suffix}"
    lines.write_bytes(COMPRESS[suffix](b'{"text": "a"}\n\n{"text": "b"}'))
    text.write_bytes(COMPRESS[suffix](b"c\n"))
    assert [(d.texts[0], d.place) for d in read_documents([lines], ["text"])] == [
        ("a", (lines, 1)),
        ("b", (lines, 3)),
    ]
    assert [d.texts for d in read_documents([text], ["text"])] == [(b"c\n",)]
    assert names(tmp_path, [str(tmp_path)], [".txt", ".jsonl"]) == [lines.name, text.name]
    assert names(tmp_path, [str(tmp_path)], [f".txt{suffix}"]) == [text.name]
    for file in (lines, text):
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(DataError, match=f"{file.name}.* ends in the middle of a {suffix} stream"):
            list(read_documents([file], ["text"]))


def test_a_folder_with_a_file_and_its_copy_is_refused(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl.gz"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.jsonl\.gz lies beside .*a\.jsonl: the same documents would be read twice"):
        find_text_files([str(tmp_path)], [".jsonl"], [])
    assert names(tmp_path, [str(tmp_path)], [".jsonl"], ["a.jsonl.gz"]) == ["a.jsonl"]
    both = [str(tmp_path / "a.jsonl.gz"), str(tmp_path / "a.jsonl")]
    assert names(tmp_path, both, [".jsonl"]) == ["a.jsonl.gz", "a.jsonl"]


@pytest.mark.parametrize("name", ["x.zip", "x.parquet", "x.tar"])
def test_other_formats_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=f"{name}: .* files are not supported\n  fix: "):
        find_text_files([str(tmp_path / name)], [".jsonl"], [])


def test_the_name_of_a_file_is_no_pattern(tmp_path: Path) -> None:
    for name in ("data[1].jsonl", "data1.jsonl"):
        (tmp_path / name).touch()
    assert find_text_files([str(tmp_path / "data[1].jsonl")], [], []) == [tmp_path / "data[1].jsonl"]


def test_a_file_that_is_compressed_in_two_ways_is_refused(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "a.jsonl.zst"):
        (tmp_path / name).touch()
    for name in (str(tmp_path), str(tmp_path / "a*")):
        with pytest.raises(DataError, match=r"a\.jsonl\.zst lies beside .*a\.jsonl\.gz: the same documents"):
            find_text_files([name], [".jsonl"], [])


def test_a_file_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    file.touch()
    for inputs in ([file, file], [file, tmp_path], [tmp_path / "f*", tmp_path / "." / "f.jsonl"]):
        with pytest.raises(DataError, match=r"f\.jsonl is given twice: its documents would be read twice"):
            find_text_files([str(name) for name in inputs], [".jsonl"], [])
    (tmp_path / "other").symlink_to(file)
    with pytest.raises(DataError, match=r"other is .*f\.jsonl, which is given too"):
        find_text_files([str(file), str(tmp_path / "other")], [], [])


@pytest.mark.parametrize("name", ["a.ndjson", "a.JSONL", "a.Json", "a.jsonl.GZ"])
def test_lines_are_lines_however_their_file_is_called(tmp_path: Path, name: str) -> None:
    content = b'{"text": "a"}\n{"text": "b"}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("GZ") else content)
    (file,) = find_text_files([str(tmp_path)], [".jsonl", ".json", ".ndjson"], [])
    assert [document.texts for document in read_documents([file], ["text"])] == [("a",), ("b",)]


@pytest.mark.parametrize("name", ["a.jsonl.zstd", "a.jsonl.Z", "a.jsonl.lz4"])
def test_other_compressions_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    for given in (tmp_path, tmp_path / name):
        with pytest.raises(
            DataError, match=rf"a\.jsonl\.\w+: \.{name.rpartition('.')[2]} files are not supported\n  fix: "
        ):
            find_text_files([str(given)], [".jsonl"], [])


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: it is a pipe or a device"):
        find_text_files([str(tmp_path / "pipe")], [], [])
