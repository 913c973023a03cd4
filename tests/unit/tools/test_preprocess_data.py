"""The preprocessing tool, as a person runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data import huggingface
from megatron.data.indexed import IndexedDataset
from megatron.data.tokenizer import ByteTokenizer, TokenizerRecord, read_record, recorded_tokenizer
from tools.preprocess_data import main

ROOT = Path(__file__).parents[3]
TEXTS = ["first", "", "zwölf", "x" * 300]


def run(folder: Path, *flags: str) -> int:
    return main(["--output-prefix", str(folder / "out"), "--tokenizer-type", "ByteTokenizer", *flags])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"text": t, "title": f"t{i}"}) + "\n" for i, t in enumerate(TEXTS)))
    return path


def documents(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [[t for i in range(b, e) for t in data[i].tolist()] for b, e in zip(data.documents, data.documents[1:])]


def test_json_lines_to_documents(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--input", str(corpus), "--append-eod", "--log-interval", "2") == 0
    prefix = tmp_path / "out_text_document"
    assert documents(prefix) == [[*t.encode(), 256] if t else [] for t in TEXTS]
    assert read_record(prefix) == TokenizerRecord.of(ByteTokenizer())
    out, err = capsys.readouterr()
    counts, tokens, time, step = out.splitlines()
    assert counts == "files: 1, documents: 4, empty texts: 1, passed over: 0"
    assert tokens == "text bytes: 311, tokens: 314 (uint16), bytes per token: 0.99"
    assert time.endswith("workers: 1, engine: numpy " + np.__version__)
    assert step == f"for the next step, pretrain_gpt.py: --data-path {tmp_path}/out_text_document"
    assert [line.split(" |")[0] for line in err.splitlines()[1:]] == [f"[{'#' * 24}] 100.0%"]


def test_without_append_eod_nothing_is_added(corpus: Path, tmp_path: Path) -> None:
    assert run(tmp_path, "--input", str(corpus)) == 0
    assert documents(tmp_path / "out_text_document") == [list(t.encode()) for t in TEXTS]


def test_every_key_gets_its_own_files(corpus: Path, tmp_path: Path) -> None:
    assert run(tmp_path, "--input", str(corpus), "--json-keys", "title", "text") == 0
    assert documents(tmp_path / "out_title_document") == [list(f"t{i}".encode()) for i in range(4)]
    assert documents(tmp_path / "out_text_document") == [list(t.encode()) for t in TEXTS]


def test_a_folder_of_sources_in_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    for name, text in {"b.py": b"\xff\xe9", "a.py": b"import os\n", "c.txt": b"no"}.items():
        (tmp_path / name).write_bytes(text)
    new = tmp_path / "new" / "deep"
    assert run(new, "--input", str(tmp_path), "--suffix", ".py", "--append-eod") == 0
    assert documents(new / "out_text_document") == [[*b"import os\n", 256], [255, 233, 256]]


def test_ids_written_as_text(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("5 70000\n3")
    flags = ["--input", str(tmp_path / "ids.txt"), "--output-prefix", str(tmp_path / "out"), "--append-eod"]
    assert main([*flags, "--tokenizer-type", "NullTokenizer", "--vocab-size", "100000"]) == 0
    assert documents(tmp_path / "out_text_document") == [[5, 70000, 3, 99999]]


@pytest.mark.parametrize(
    ("line", "flags", "message"),
    [
        ('{"text": ', [], "c.jsonl:5 is not JSON"),
        ('{"text": "\\ud800"}', [], "c.jsonl:5: 'text' is not Unicode: character 0 is half of a surrogate pair"),
        ('{"txt": "a"}', [], "c.jsonl:5 has no key 'text'"),
        ("", ["--json-keys", "text", "text"], "a key is named twice"),
        ("", ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"], "c.jsonl:1: NullTokenizer reads ids 0..8"),
        ("", ["--input", "nothing.jsonl"], "--input nothing.jsonl: there is no such file"),
    ],
)
def test_a_mistake_is_told_in_a_sentence_and_leaves_no_files(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, flags: list[str], message: str
) -> None:
    if line:
        with corpus.open("a") as file:
            file.write(line + "\n")
    assert run(tmp_path, "--input", str(corpus), *flags) == 1
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokenizer-type", "NullTokenizer"], "must be told how many ids"),
        (["--vocab-size", "300"], "ByteTokenizer has 257 ids, not 300"),
        (
            ["--tokenizer-type", "HuggingFaceTokenizer"],
            "HuggingFaceTokenizer must be told where it is",
        ),
        (["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "nowhere"], "there is no nowhere"),
        (["--tokenizer-model", "nowhere"], "ByteTokenizer reads no file"),
    ],
)
def test_a_tokenizer_that_cannot_be_made_is_a_wrong_flag(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert run(tmp_path, "--input", str(corpus), *flags) == 2
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]


# --- a tokenizer of Hugging Face ---


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes as ids, and 60,000 words more, so that the ids still fit 16 bits."""
    tokenizer = huggingface.bytes_as_ids()
    tokenizer.add_tokens([f"~{i}~" for i in range(60_000)])
    folder = tmp_path_factory.mktemp("model")
    for name, content in huggingface.tokenizer_files(tokenizer).items():
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text("not of the tokenizer")
    return folder


def run_model(folder: Path, model: Path, *flags: str) -> int:
    chosen = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model)]
    return main(["--output-prefix", str(folder / "out"), *chosen, *flags])


def test_documents_and_the_tokenizer_beside_them(corpus: Path, tmp_path: Path, model: Path) -> None:
    assert run_model(tmp_path, model, "--input", str(corpus), "--append-eod", "--json-keys", "text", "title") == 0
    prefix = tmp_path / "out_text_document"
    assert documents(prefix) == [[*t.encode(), 256] if t else [] for t in TEXTS]
    assert IndexedDataset(prefix).dtype == np.uint16
    for key in ("text", "title"):
        kept = tmp_path / f"out_{key}_document.tokenizer"
        assert {p.name: p.read_bytes() for p in kept.iterdir()} == {
            p.name: p.read_bytes() for p in model.iterdir() if p.suffix == ".json"
        }
    tokenizer = recorded_tokenizer(prefix)
    assert tokenizer is not None
    assert tokenizer.decode(documents(prefix)[2]) == "zwölf<|endoftext|>"


def test_a_tokenizer_of_before_leaves_nothing(corpus: Path, tmp_path: Path, model: Path) -> None:
    (model / huggingface.SPECIAL).write_text('{"eos_token": "<|endoftext|>"}')
    assert run_model(tmp_path, model, "--input", str(corpus)) == 0
    kept = tmp_path / "out_text_document.tokenizer"
    assert len(list(kept.iterdir())) == 3
    (model / huggingface.SPECIAL).unlink()
    assert run_model(tmp_path, model, "--input", str(corpus)) == 0
    assert sorted(p.name for p in kept.iterdir()) == [huggingface.TOKENIZER, huggingface.CONFIG]


def test_a_text_in_another_encoding_is_named_and_leaves_no_files(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"a.txt": b"good", "b.txt": b"caf\xe9"}.items():
        (tmp_path / name).write_bytes(text)
    assert run_model(tmp_path, model, "--input", str(tmp_path)) == 1
    err = capsys.readouterr().err
    assert f"{tmp_path}/b.txt is not UTF-8 text: byte 3: unexpected end of data\n  fix: iconv -f LATIN1" in err
    assert "--exclude b.txt" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "b.txt"]


def test_nothing_to_learn_from_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.jsonl").write_text('{"text": ""}\n' * 3)
    assert run(tmp_path, "--input", str(tmp_path / "c.jsonl")) == 1
    assert "the documents of the input are all empty (3)" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]


def test_a_failed_run_leaves_an_older_dataset_whole(corpus: Path, tmp_path: Path) -> None:
    assert run(tmp_path, "--input", str(corpus)) == 0
    before = {p: p.read_bytes() for p in tmp_path.glob("out*")}
    (tmp_path / "bad.jsonl").write_text("{\n")
    assert run(tmp_path, "--input", str(corpus), str(tmp_path / "bad.jsonl")) == 1
    assert {p: p.read_bytes() for p in tmp_path.glob("out*")} == before


def test_it_starts_without_torch_and_exits_by_what_happened(tmp_path: Path) -> None:
    """The real process: no traceback, exit status 1, and torch not imported on the way."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    (tmp_path / "bad.jsonl").write_text("{\n")
    command = [sys.executable, "-X", "importtime", str(ROOT / "tools" / "preprocess_data.py")]
    command += ["--input", str(tmp_path / "bad.jsonl"), "--output-prefix", str(tmp_path / "o")]
    done = subprocess.run(
        [*command, "--tokenizer-type", "ByteTokenizer"], env=environment, capture_output=True, text=True, check=False
    )
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == 1
    assert "bad.jsonl:1 is not JSON" in done.stderr
    assert "Traceback" not in done.stderr
    assert "megatron.data.indexed" in imported
    assert "torch" not in imported
