"""Origins of documents, against the texts that the inputs hold."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest

from megatron.data.document_origins import DocumentOrigins
from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.preprocess.encode import PreprocessOptions
from tools import preprocess_data
from tools.merge_datasets import main as merge
from tools.preprocess_data import main as preprocess


def preprocessed(prefix: Path, *inputs: Path) -> Path:
    flags = ["--output-prefix", str(prefix), "--tokenizer-type", "ByteTokenizer", "--on-bad-line", "skip"]
    assert preprocess(["--input", *map(str, inputs), *flags]) == 0
    return Path(f"{prefix}_text_document")


def check(prefix: Path) -> None:
    """Compare each document with the line of the input that its origin names."""
    origins, data = DocumentOrigins.open(prefix), IndexedDataset(prefix)
    assert origins is not None
    assert origins.documents == data.num_documents
    for document in range(data.num_documents):
        found = origins.locate(document)
        assert found is not None
        name, row = found
        content = Path(name).read_bytes()
        lines = (gzip.decompress(content) if name.endswith(".gz") else content).split(b"\n")
        text = json.loads(lines[row - 1])["text"].encode() if row else b"\n".join(lines)
        first, last = data.documents[document : document + 2].tolist()
        assert b"".join(data[i].astype(np.uint8).tobytes() for i in range(first, last)) == text


def write_lines(path: Path, count: int, draw: Random) -> Path:
    """Write lines of which some are blank, empty documents, or invalid."""
    texts = [f"{path.name} {number}" if draw.random() < 0.9 else "" for number in range(count)]
    lines = [draw.choices((json.dumps({"text": text}), "", "{"), (20, 1, 1))[0] for text in texts]
    lines[0] = json.dumps({"text": "first"})
    content = "\n".join(lines).encode() + b"\n" * draw.randrange(2)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_every_document_is_found_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess_data, "PreprocessOptions", partial(PreprocessOptions, block_bytes=300))
    draw = Random(1)
    files = [write_lines(tmp_path / name, 150, draw) for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl")]
    plain = [tmp_path / "d.txt", tmp_path / "e.txt"]
    for file in plain:
        file.write_text(f"all of {file.name}\nand more")
    whole = preprocessed(tmp_path / "whole", files[0], plain[0], *files[1:], plain[1])
    check(whole)
    parts = [preprocessed(tmp_path / "x", files[0], plain[0]), preprocessed(tmp_path / "y", *files[1:], plain[1])]
    merged = tmp_path / "merged"
    assert merge(["--input", *map(str, parts), "--output-prefix", str(merged)]) == 0
    check(merged)
    assert Path(f"{merged}.origins").read_bytes() == Path(f"{whole}.origins").read_bytes()


def test_consecutive_rows_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess_data, "PreprocessOptions", partial(PreprocessOptions, block_bytes=300))
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(500)))
    origins = DocumentOrigins.open(preprocessed(tmp_path / "out", lines))
    assert origins is not None
    assert origins.runs.tolist() == [(0, 1, 0)]
    assert origins.locate(499) == (str(lines), 500)
    with pytest.raises(IndexError):
        origins.locate(500)


def test_a_part_without_origins_is_unknown_in_the_merged_pair(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "one"}\n{"text": "two"}\n')
    parts = [preprocessed(tmp_path / name, lines) for name in ("old", "new")]
    Path(f"{parts[0]}.origins").unlink()
    assert merge(["--input", *map(str, parts), "--output-prefix", str(tmp_path / "all")]) == 0
    origins = DocumentOrigins.open(tmp_path / "all")
    assert origins is not None
    assert [origins.locate(document) for document in range(4)] == [None, None, (str(lines), 1), (str(lines), 2)]
    assert DocumentOrigins.open(parts[0]) is None


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "one"}\n')
    prefix = preprocessed(tmp_path / "out", lines)
    path = Path(f"{prefix}.origins")
    whole = path.read_bytes()
    names = json.dumps([str(lines)]).encode()
    assert whole.endswith(names)
    head, run = whole[: -len(names)], whole[: -len(names)][-20:]
    wrong_runs = [head[:-4] + file.to_bytes(4, "little", signed=True) + names for file in (-2, 1)]
    wrong_runs += [head[:-20] + document.to_bytes(8, "little", signed=True) + run[8:] + names for document in (-1, 9)]
    deep = head + b"[" * 100_000
    for damaged in (
        whole[:20],
        whole[:40],
        b"x" + whole[1:],
        whole[:-1],
        *wrong_runs,
        head + b"[1]",
        head + b"{}",
        deep,
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="origins is damaged"):
            DocumentOrigins.open(prefix)
    path.write_bytes(whole)
    with pytest.raises(DataError, match="it is of 1 documents, the pair has 2"):
        DocumentOrigins.open(prefix, 2)
