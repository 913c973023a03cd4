"""Corpora in an object store, read over HTTP from a server on this machine, against the same files on disk."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import rmtree

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import s3fs
from pyarrow import parquet

from megatron.checkpoint import object_store
from megatron.data.preprocess.encode import PreprocessOptions
from tests.unit.checkpoint.s3_server import Request, Store, serving, settings
from tools import preprocess_data
from tools.merge_datasets import main as merge
from tools.preprocess_data import main

COMPARED = ("bin", "idx", "tokens.json")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Serve an empty store, with short delays between retries."""
    s3fs.S3FileSystem.clear_instance_cache()
    with serving() as (address, store):
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setitem(fsspec.config.conf, "s3", settings(address))
        monkeypatch.setattr(object_store, "FIRST_WAIT", 0.001)
        monkeypatch.setattr(preprocess_data, "PreprocessOptions", partial(PreprocessOptions, block_bytes=2000))
        yield store


@pytest.fixture
def corpus(tmp_path: Path, store: Store) -> Path:
    """Files of every kind, on disk and in the store."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, suffix in enumerate((".jsonl", ".jsonl.gz", ".parquet", ".arrow", ".txt", ".json")):
        records = [{"text": f"{suffix} {i} " + "x" * (i % 90)} for i in range(200)]
        lines = "".join(json.dumps(record) + "\n" for record in records).encode()
        path = folder / f"{number}{suffix}"
        if suffix == ".parquet":
            parquet.write_table(pa.Table.from_pylist(records), path)
        elif suffix == ".arrow":
            table = pa.Table.from_pylist(records)
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
        else:
            content = json.dumps(records).encode() if suffix == ".json" else lines
            path.write_bytes(gzip.compress(lines) if suffix == ".jsonl.gz" else content)
        store.objects[f"bucket/texts/{path.name}"] = path.read_bytes()
    store.objects["bucket/texts/README.md"] = b"not read"
    return folder


def run(source: str | Path, prefix: Path, *flags: str) -> int:
    fixed = ["--output-prefix", str(prefix), "--tokenizer-type", "ByteTokenizer", "--append-eod"]
    return main(["--input", str(source), *fixed, *flags])


def files(prefix: Path) -> dict[str, bytes]:
    return {suffix: Path(f"{prefix}_text_document.{suffix}").read_bytes() for suffix in COMPARED}


@pytest.mark.parametrize(
    "source",
    [
        "s3://bucket/texts",
        pytest.param("s3://bucket/texts/?.*[!d]", marks=pytest.mark.slow),
        pytest.param("s3://bucket/**/*.[jpat]*", marks=pytest.mark.slow),
    ],
)
def test_files_in_a_store_give_the_bytes_of_files_on_disk(corpus: Path, tmp_path: Path, source: str) -> None:
    assert run(corpus, tmp_path / "disk") == 0
    assert run(source, tmp_path / "store") == 0
    assert files(tmp_path / "store") == files(tmp_path / "disk")


def test_a_store_that_fails_for_a_moment_is_asked_again(
    corpus: Path, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(corpus, tmp_path / "disk") == 0
    faults = {3: "503", 5: "reset", 7: "truncated", 9: "503"}
    store.fault = lambda request: faults.get(request.number % 11) if request.number < 40 else None
    assert run("s3://bucket/texts", tmp_path / "store") == 0
    assert "retrying in" in capsys.readouterr().err
    assert files(tmp_path / "store") == files(tmp_path / "disk")


def test_a_store_that_keeps_failing_is_named(
    corpus: Path, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(request: Request) -> str | None:
        return "503" if request.kind == "GET" and request.key.endswith("1.jsonl.gz") else None

    store.fault = fault
    assert run("s3://bucket/texts", tmp_path / "store") == 1
    assert "s3://bucket/texts/1.jsonl.gz cannot be read" in capsys.readouterr().err
    assert not Path(f"{tmp_path}/store_text_document.bin").exists()


def test_an_object_that_changes_while_it_is_read(
    corpus: Path, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(request: Request) -> str | None:
        if request.kind == "GET" and request.key.endswith("5.json"):
            store.objects["bucket/texts/0.jsonl"] += b"\n"
        return None

    store.fault = fault
    assert run("s3://bucket/texts", tmp_path / "store") == 1
    assert "s3://bucket/texts/0.jsonl was changed while it was read" in capsys.readouterr().err


def test_what_is_not_there_is_named(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("s3://bucket/nothing", tmp_path / "store") == 1
    assert "--input s3://bucket/nothing: there is no such file" in capsys.readouterr().err
    assert run("s3://key:secret@bucket/texts", tmp_path / "store") == 1
    assert "secret" not in capsys.readouterr().err.replace("secrets", "")


def written(store: Store) -> dict[str, bytes]:
    prefix = "bucket/out/corpus_text_document."
    return {key.removeprefix(prefix): content for key, content in store.objects.items() if key.startswith(prefix)}


def test_token_files_are_uploaded_when_they_are_complete(
    corpus: Path, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(corpus, tmp_path / "disk") == 0
    flags = ["--staging-dir", str(tmp_path / "staging"), "--tokenizer-type", "ByteTokenizer", "--append-eod"]
    command = ["--input", str(corpus), "--output-prefix", "s3://bucket/out/corpus", *flags]
    assert main([word for word in command if word not in flags[:2]]) == 2
    assert "fix: --staging-dir FOLDER_ON_A_LOCAL_DISK" in capsys.readouterr().err

    def fault(request: Request) -> str | None:
        return "503" if request.kind in ("PUT", "Create") and request.key.endswith(".idx") else None

    store.fault = fault
    assert main(command) == 1
    assert "the upload of s3://bucket/out/corpus_text_document.idx failed" in capsys.readouterr().err
    assert {*written(store)} == {"bin", "origins", "manifest.json", "tokens.json"}  # the index comes last
    store.fault = lambda request: None
    assert main(command) == 0  # uploads what lies on the disk
    assert {suffix: written(store)[suffix] for suffix in COMPARED} == files(tmp_path / "disk")
    assert {*written(store)} == {*COMPARED, "origins", "manifest.json"}
    assert list((tmp_path / "staging").iterdir()) == []
    assert main(command) == 2
    assert "s3://bucket/out/corpus_text_document.idx is there already" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert "--data-path s3://bucket/out/corpus_text_document" in capsys.readouterr().out
    merged = [
        "--input",
        str(tmp_path / "disk_text_document"),
        "--output-prefix",
        "s3://bucket/out/corpus_text_document",
    ]
    assert merge([*merged, "--overwrite", *flags[:2]]) == 0
    assert {suffix: written(store)[suffix] for suffix in COMPARED} == files(tmp_path / "disk")
    assert b'"steps": []' in written(store)["manifest.json"]


def test_a_complete_output_is_not_uploaded_after_its_input_has_changed(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "old"}\n')
    assert run(tmp_path / "a.jsonl", tmp_path / "disk") == 0
    staging, store.fault = tmp_path / "staging", lambda request: "503" if request.key.endswith(".idx") else None
    output = ["--output-prefix", "s3://bucket/out/corpus_text_document", "--staging-dir", str(staging)]
    merging = ["--input", str(tmp_path / "disk_text_document"), *output, "--overwrite"]
    prefix, *to_store = "s3://bucket/out/corpus", "--staging-dir", str(staging), "--overwrite"
    writing = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", prefix, "--tokenizer-type", "ByteTokenizer"]
    assert (main([*writing, *to_store]), merge(merging)) == (1, 1)
    store.fault = lambda request: None
    (tmp_path / "a.jsonl").write_text('{"text": "new"}\n')
    assert run(tmp_path / "a.jsonl", tmp_path / "disk", "--overwrite") == 0
    capsys.readouterr()
    for tool, command in ((main, [*writing, *to_store]), (merge, merging)):
        assert tool(command) == 1
        seen = capsys.readouterr().err
        assert "but what they were made from has changed" in seen
        rmtree(seen.split("rm -r ")[1].strip())
        assert tool(command) == 0
        assert bytes(np.frombuffer(written(store)["bin"], np.uint16)[:3].tolist()) == b"new"
