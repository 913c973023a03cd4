"""Parquet, Arrow, datasets of Hugging Face and pipes: the documents of the same text as JSON lines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from megatron.data.document_origins import DocumentOrigins
from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.preprocess import tables
from megatron.data.preprocess.corpus import read_documents
from megatron.data.preprocess.encode import PreprocessOptions, write_dataset
from megatron.data.preprocess.files import find_text_files, spool_pipes
from megatron.data.tokenizers.huggingface import ByteTokenizer
from megatron.data.tokenizers.tokenizer import TokenizerOptions
from tests.unit.data.pairs import COMPRESS
from tests.unit.data.preprocess.test_preprocess import RecordingListener, pair
from tools.deduplicate import main as deduplicate
from tools.preprocess_data import main as preprocess

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".txt")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    draw = Random(4)
    texts = ["".join(draw.choices('ab é東\U0001f469\n"\\', k=draw.choice((0, 3, 700)))) for _ in range(600)]
    return [{"id": number, "text": text, "title": f"{number % 7}"} for number, text in enumerate(texts)]


def write_arrow(path: Path, table: pa.Table, stream: bool = False, rows: int = 128) -> Path:
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]]) -> Iterator[dict[str, str]]:
    """The rows in every form, each written by another library; the values are the values of ``--input``."""
    folder = tmp_path_factory.mktemp("forms")
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    for suffix, compress in {"": bytes, **COMPRESS}.items():
        (folder / f"c.jsonl{suffix}").write_bytes(compress(lines))
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(folder / "small-groups.parquet", batch_size=50)
    table = pa.Table.from_pylist(rows)
    parquet.write_table(table, folder / "one-group.parquet", compression="zstd")
    texts = table.column("text").dictionary_encode()
    write_arrow(folder / "dictionary.arrow", table.set_column(1, "text", texts.combine_chunks()), rows=600)
    write_arrow(folder / "stream.arrow", table, stream=True)
    dataset.save_to_disk(folder / "saved", num_shards=3)
    (folder / "saved" / "cache-0123.arrow").write_bytes(b"of Dataset.map")
    datasets.DatasetDict({"train": dataset}).save_to_disk(folder / "splits")
    (folder / "hub").mkdir()
    (folder / "hub" / "train.jsonl").write_bytes(lines)
    (folder / "hub" / "test.jsonl").write_bytes(lines[: lines.index(b"\n") + 1])
    os.mkfifo(folder / "pipe")
    inputs = {path.name: str(path) for path in folder.iterdir()}
    inputs |= {"-": "-", "hub": f"hf:{folder}/hub:train", "hub, with config": f"hf:{folder}/hub:default:train"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        yield inputs


FORMS = (
    *("c.jsonl.gz", "c.jsonl.zst", "c.jsonl.bz2", "c.jsonl.xz", "small-groups.parquet", "one-group.parquet"),
    *("dictionary.arrow", "stream.arrow", "saved", "splits", "hub", "hub, with config", "pipe", "-"),
)


def encoded(name: str, folder: Path, workers: int = 1, block_bytes: int = 20_000) -> list[tuple[bytes, bytes]]:
    """.bin and .idx of text and title."""
    with spool_pipes([name], str(folder / "out")) as inputs:
        files = find_text_files(inputs, SUFFIXES, [])
        plan = PreprocessOptions(
            files,
            ("text", "title"),
            str(folder / "out"),
            TokenizerOptions("ByteTokenizer"),
            append_eod=True,
            workers=workers,
            block_bytes=block_bytes,
        )
        totals, _ = write_dataset(plan, ByteTokenizer(), RecordingListener())
        assert totals.stored_bytes == sum(file.stat().st_size for file in files)
    assert not list(folder.glob("*.jsonl"))
    return [pair(str(folder / f"out_{key}_document")) for key in plan.keys]


@pytest.fixture(scope="module")
def expected(corpora: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[bytes, bytes]]:
    return encoded(corpora["c.jsonl"], tmp_path_factory.mktemp("expected"))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_bytes(
    corpora: dict[str, str], expected: list[tuple[bytes, bytes]], tmp_path: Path, form: str
) -> None:
    standard_input = os.dup(0)
    pipe = corpora["pipe"]
    feeder = threading.Thread(target=lambda: Path(pipe).write_bytes(Path(corpora["c.jsonl"]).read_bytes()))
    try:
        if form in ("pipe", "-"):
            feeder.start()
        if form == "-":
            os.dup2(os.open(pipe, os.O_RDONLY), 0)
        assert encoded(corpora[form], tmp_path, workers=2 if form == "one-group.parquet" else 1) == expected
    finally:
        os.dup2(standard_input, 0)
        os.close(standard_input)
    if feeder.ident:
        feeder.join()


def test_batches_of_a_table_are_small(tmp_path: Path) -> None:
    """However many rows its groups and batches have, and only a part of them is in memory."""
    texts = [f"{number:010}" * 100 for number in range(16_000)]
    table = pa.table({"text": texts})
    parquet.write_table(table, tmp_path / "a.parquet", compression="none")
    write_arrow(tmp_path / "a.arrow", table, rows=16_000)
    for name in ("a.parquet", "a.arrow"):
        before = pa.total_allocated_bytes()
        batches = []
        for content, _ in tables.read_batches(tmp_path / name, ["text"], 100_000, 1 << 20):
            assert content is not None
            batches.append(content)
            assert pa.total_allocated_bytes() < before + 8_000_000
        assert max(map(len, batches)) < 150_000
        assert [row["text"] for content in batches for row in tables.parse_rows(content)] == [
            text.encode() for text in texts
        ]


def invalid_utf8() -> pa.Array:
    bytes_ = pa.array([b"good", b"caf\xe9", b"good"])
    return pa.Array.from_buffers(pa.string(), 3, bytes_.buffers())


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize(
    ("columns", "message", "good"),
    [
        ({"text": ["good", None, "good"]}, ":2: 'text' is null, not a string", 2),
        ({"text": ["good", "a\0b", "good"]}, ":2: 'text' is not text: character 1 is NUL", 2),
        ({"text": invalid_utf8()}, ":2 is not UTF-8 text: unexpected end of data", 2),
        ({"text": [1, 2, 3]}, ":1: 'text' is int64, not a string", 0),
        ({"id": [1], "body": ["b"]}, ":1 has no column 'text'; its columns: id, body", 0),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, suffix: str, columns: dict[str, object], message: str, good: int) -> None:
    path, table = tmp_path / f"x{suffix}", pa.table(columns)
    parquet.write_table(table, path) if suffix == ".parquet" else write_arrow(path, table)
    plan = PreprocessOptions([path], ("text",), str(tmp_path / "out"), TokenizerOptions("ByteTokenizer"))
    with pytest.raises(DataError) as caught:
        write_dataset(plan, ByteTokenizer(), RecordingListener())
    assert caught.value.seen == f"{path}{message}"
    assert (caught.value.fixes[-1] == "--on-bad-line skip") is bool(good), (
        "not for what would lose the rest of the file"
    )
    (tmp_path / "y.txt").write_text("y")
    messages = RecordingListener()
    totals, _ = write_dataset(replace(plan, files=[path, tmp_path / "y.txt"], skip_bad=True), ByteTokenizer(), messages)
    assert messages.output[1] == f"passed over: {path}{message}"
    assert totals.bad == 1
    assert pair(f"{plan.prefix}_text_document")[0].decode("utf-16-le") == "good" * good + "y"


@pytest.mark.parametrize("name", ["small-groups.parquet", "stream.arrow"])
def test_a_truncated_table_is_named(
    corpora: dict[str, str], rows: list[dict[str, object]], tmp_path: Path, name: str
) -> None:
    content = Path(corpora[name]).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    read = []
    with pytest.raises(DataError, match=rf"{name}:\d+ cannot be read from here on: .*\n  fix: copy the file again"):
        read.extend(document.texts[0] for document in read_documents([tmp_path / name], ["text"]))
    assert read == [row["text"] for row in rows[: len(read)]]
    assert len(read) >= 128 * (name == "stream.arrow")


def test_a_folder_of_tables(corpora: dict[str, str], tmp_path: Path) -> None:
    """A saved dataset in it is read as such, without its JSON files."""
    shutil.copytree(corpora["saved"], tmp_path / "a" / "d")
    shutil.copy(corpora["one-group.parquet"], tmp_path / "a" / "e.PARQUET")
    files = find_text_files([str(tmp_path)], SUFFIXES, [])
    assert [file.name for file in files] == [*(f"data-0000{i}-of-00003.arrow" for i in range(3)), "e.PARQUET"]


def test_a_split_has_to_be_chosen(corpora: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.DatasetDict(
        {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test")}
    ).save_to_disk(tmp_path / "d")
    with pytest.raises(DataError, match=f"holds the splits train, test\n  fix: --input {tmp_path}/d/train"):
        find_text_files([str(tmp_path / "d")], SUFFIXES, [])
    hub = corpora["hub"].removesuffix(":train")
    for name in (hub, f"{hub}:dev"):
        with pytest.raises(DataError, match=rf"the dataset has the splits train, test\n  fix: --input {hub}:train \|"):
            find_text_files([name], SUFFIXES, [])
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"--input hf:no/data: loading the dataset failed: .*\n  fix: where there is a"):
        find_text_files(["hf:no/data"], SUFFIXES, [])


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())]
)
def test_bytes_are_text_where_they_are_utf_8(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["plain", "caf\u00e9", "", "\U0001f600"]
    path = tmp_path / "x.arrow"
    write_arrow(path, pa.table({"text": pa.array([text.encode() for text in texts], pa.binary()).cast(kind)}))
    assert [document.texts for document in read_documents([path], ["text"])] == [(text,) for text in texts]
    write_arrow(path, pa.table({"text": pa.array([b"good", b"\xff\xd8"], pa.binary()).cast(kind)}))
    with pytest.raises(DataError, match=":2 is not UTF-8 text"):
        list(read_documents([path], ["text"]))


def test_a_program_that_imports_nothing_else_reads_tables(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": ["a", "bc"]}), tmp_path / "x.parquet")
    read = "from megatron.data.preprocess.corpus import read_documents\n"
    read += "print([document.texts for document in read_documents([Path(sys.argv[1])], ['text'])])"
    command = [sys.executable, "-c", f"import sys\nfrom pathlib import Path\n{read}", str(tmp_path / "x.parquet")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[('a',), ('bc',)]\n"


@pytest.mark.parametrize("step", [[], ["--map", "builtins:dict"]], ids=["texts", "records"])
def test_an_overlong_row_keeps_its_number(tmp_path: Path, step: list[str]) -> None:
    """As an overlong line does, for origins and drop lists."""
    texts = [f"text {number}" for number in range(9)]
    texts[3], texts[7] = "x" * 9000, texts[5]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    parquet.write_table(pa.Table.from_pydict({"text": texts}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        file, drop, out = (str(tmp_path / each) for each in (name, "list-" + name, "out-" + name))
        flags = ["--input", file, "--max-line-bytes", "1000", "--on-bad-line", "skip", "--workers", "1"]
        assert deduplicate([*flags, "--method", "exact", "--output", drop]) == 0
        flags += ["--tokenizer-type", "ByteTokenizer", "--output-prefix", out]
        assert preprocess([*flags, "--drop", drop, *step]) == 0
        data, origins = IndexedDataset(f"{out}_text_document"), DocumentOrigins.open(f"{out}_text_document")
        assert origins is not None
        found = {origins.locate(i)[1]: bytes(data[i].tolist()).decode() for i in range(len(data))}
        assert found == {number: text for number, text in enumerate(texts, 1) if number not in (4, 8)}, name
