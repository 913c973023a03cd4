"""Blocks: whole lines, all of them, in order, wherever the cuts lie."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.errors import DataError
from megatron.data.preprocess.corpus import (
    Block,
    FileBlock,
    LineBlock,
    block_bytes_of,
    is_json_lines,
    split_into_blocks,
    split_lines_file,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    content=st.lists(st.sampled_from([b"a", b"bb", b"\n", b"\n", b"c" * 40]), max_size=40).map(b"".join),
    block_bytes=st.integers(1, 60),
    suffix=st.sampled_from(["", ".gz", ".zst"]),
)
def test_blocks_are_the_file(content: bytes, block_bytes: int, suffix: str) -> None:
    stored = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix](content)
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
    assert [block_bytes_of(block) for block in blocks] == [len(part) for part in read]
    if not suffix:  # as short as lines allow
        assert all(part.count(b"\n", block_bytes - 1, -1) == 0 for part in read)


def write(folder: Path, **files: bytes) -> list[Path]:
    paths = [folder / name.replace("_", ".") for name in files]
    for path, content in zip(paths, files.values()):
        path.write_bytes(content)
    return paths


def test_small_texts_share_a_block_and_the_order_is_kept(tmp_path: Path) -> None:
    files = write(tmp_path, a_txt=b"a" * 6, b_txt=b"b" * 6, c_txt=b"c", d_jsonl=b"{}\n", e_txt=b"e", f_md=b"f" * 99)
    blocks: list[Block] = list(split_into_blocks(files, 10))
    a, b, c, d, e, f = files
    assert blocks == [
        FileBlock((a, b), 12),
        FileBlock((c,), 1),
        LineBlock(d, range(3), 3, first=True, last=True),
        FileBlock((e, f), 100),
    ]


@pytest.mark.parametrize(
    ("name", "lines"),
    [("x.jsonl", True), ("x.json.gz", True), ("x.jsonl.zst", True), ("x.txt", False), ("x.jsonl.old", False)],
)
def test_which_files_hold_lines(name: str, lines: bool) -> None:
    assert is_json_lines(Path(name)) == lines


def test_a_damaged_file_gives_its_whole_lines_and_the_reason(tmp_path: Path) -> None:
    content = b"".join(b"line %d %d\n" % (i, i * i) for i in range(5000))
    (file,) = write(tmp_path, x_jsonl=b"")
    file = file.rename(tmp_path / "x.jsonl.gz")
    file.write_bytes(gzip.compress(content)[:-100])
    blocks = list(split_lines_file(file, 10_000))
    whole = b"".join(block.read() for block in blocks)
    assert content.startswith(whole)
    assert whole.endswith(b"\n")
    assert len(whole) > 10_000
    assert [block.damage for block in blocks if block.damage] == ["ends in the middle of a .gz stream"]
    assert blocks[-1].damage
    assert sum(block.stored for block in blocks) == file.stat().st_size


def test_a_file_that_shrinks_is_told(tmp_path: Path) -> None:
    (file,) = write(tmp_path, x_jsonl=b'{"text": "a"}\n' * 10)
    (block,) = split_lines_file(file)
    file.write_bytes(b'{"text": "a"}\n')
    with pytest.raises(DataError, match="became shorter while it was read"):
        block.read()
