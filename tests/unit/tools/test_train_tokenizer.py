"""The tool that makes a tokenizer, as a person runs it, and the result in the Hugging Face libraries."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenizers.huggingface import (
    END_OF_DOCUMENT,
    NO_EXPORT_NOTE,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    HuggingFaceTokenizer,
)
from megatron.data.tokenizers.tokenizer import hugging_face_files_of
from tests.processes import wait_until_gone
from tools import preprocess_data
from tools.train_tokenizer import main

ROOT = Path(__file__).parents[3]
LINES = ["def area(width, height):", "    return width * height", "", "for row in rows: print(row)"] * 20


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": line, "title": "t"}) + "\n" for line in LINES))
    (folder / "b.py").write_text("\n".join(LINES))
    (folder / "c.md").write_bytes(b"\xff\xfe")
    return folder


def train(corpus: Path, output: Path, *flags: str) -> int:
    return main(["--input", str(corpus), "--vocab-size", "290", "--output", str(output), *flags])


def test_made_from_text_and_read_by_everyone(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(corpus, tmp_path / "bpe", "--suffix", ".jsonl", ".py") == 0
    out = capsys.readouterr().out.splitlines()
    text_bytes = len("".join(LINES)) + len("\n".join(LINES))
    assert out[0] == f"files: 2, documents: 81, text bytes: {text_bytes:,}"
    assert re.fullmatch(r"entries: 290, bytes per token: \d\.\d\d in the first \d\.\d\d KiB", out[1])
    step, printed = out[2].split(": ")
    assert step == "for the next step, preprocess_data.py"
    assert printed == f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}/bpe"
    assert sorted(p.name for p in (tmp_path / "bpe").iterdir()) == [TOKENIZER_JSON, TOKENIZER_CONFIG]

    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "bpe"), HuggingFaceTokenizer(tmp_path / "bpe")
    assert (len(theirs), theirs.eos_token) == (ours.vocab_size, END_OF_DOCUMENT) == (290, END_OF_DOCUMENT)
    assert theirs.eos_token_id == ours.eod
    text = "for row in rows: naïve = width * 東京"
    assert theirs(text).input_ids == ours.encode(text).tolist()
    assert theirs.decode(theirs(text).input_ids) == text

    flags = ["--input", str(corpus), "--output-prefix", str(tmp_path / "out"), "--append-eod", *printed.split()]
    assert preprocess_data.main(flags) == 0
    data = IndexedDataset(tmp_path / "out_text_document")
    texts = [ours.decode(data[i].tolist()) for i in range(len(data))]
    assert texts == [line + END_OF_DOCUMENT for line in LINES if line]


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_sentencepiece_model_is_made_and_used(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model_type: str
) -> None:
    flags = ["--type", "sentencepiece", "--sentencepiece-model-type", model_type, "--input-sentence-size", "50"]
    assert train(corpus, tmp_path / "spm", "--suffix", ".jsonl", *flags) == 0
    out = capsys.readouterr().out.splitlines()
    entries = int(re.findall(r"entries: (\d+)", out[1])[0])
    assert out[2] == "lines: 60, trained on a sample of 50 (--input-sentence-size)"
    assert (out[3] == NO_EXPORT_NOTE) == (model_type == "unigram")
    printed = out[-1].split(": ")[1]
    assert printed == f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {tmp_path}/spm"
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm" / "tokenizer.model"))
    assert theirs.get_piece_size() == entries <= 290
    text = "for row in rows: na\u00efve = width * \u6771\u4eac"
    if model_type == "bpe":
        hugging_face = AutoTokenizer.from_pretrained(tmp_path / "spm")
        assert hugging_face(text, add_special_tokens=False).input_ids == theirs.encode(text)

    flags = ["--input", str(corpus / "a.jsonl"), "--output-prefix", str(tmp_path / "out"), "--append-eod"]
    assert preprocess_data.main([*flags, *printed.split()]) == 0
    assert (NO_EXPORT_NOTE in capsys.readouterr().out) == (model_type == "unigram")
    data = IndexedDataset(tmp_path / "out_text_document")
    assert [data[i].tolist() for i in range(len(data))] == [[*theirs.encode(line), 2] for line in LINES if line]
    exported = hugging_face_files_of(tmp_path / "out_text_document")
    assert set(exported) == ({TOKENIZER_JSON, TOKENIZER_CONFIG} if model_type == "bpe" else set())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--type", "sentencepiece", "--vocab-size", "258"],
            "a vocabulary of 258 is too small for the 256 bytes, <unk>",
        ),
        (["--sentencepiece-model-type", "bpe"], "--sentencepiece-model-type applies only to SentencePiece"),
        (
            ["--input-sentence-size", "9"],
            "--input-sentence-size applies only to SentencePiece\n  fix: --type sentencepiece",
        ),
        (["--type", "sentencepiece", "--input-sentence-size", "0"], "--input-sentence-size 0 must be at least 1"),
    ],
)
def test_flags_that_cannot_be_are_told(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert train(corpus, tmp_path / "spm", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "spm").exists()


def test_less_text_than_entries_is_told(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(corpus, tmp_path / "bpe", "--vocab-size", "9000") == 0
    entries = HuggingFaceTokenizer(tmp_path / "bpe").vocab_size
    assert f"entries: {entries} (not 9,000: the text has no more pairs that occur twice)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--vocab-size", "100"], 2, "a vocabulary of 100 is too small for the 256 bytes"),
        (["--input", "nothing"], 1, "--input nothing: there is no such file"),
        (["--suffix", ".md"], 1, "c.md is UTF-16, not UTF-8 text"),
        (["--suffix", ".gz"], 1, "no file below it ends in .gz"),
        (["--json-keys", "body"], 1, "a.jsonl:1 has no key 'body'"),
    ],
)
def test_a_mistake_is_told_in_a_sentence_and_leaves_no_files(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], status: int, message: str
) -> None:
    assert train(corpus, tmp_path / "bpe", *flags) == status
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["corpus"]


def test_bad_lines_are_passed_over_if_asked_to(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (corpus / "a.jsonl").open("a") as file:
        file.write('{"text": \n{"text": "last"}\n')
    assert train(corpus, tmp_path / "bpe", "--suffix", ".jsonl") == 1
    assert "a.jsonl:81 is not JSON" in capsys.readouterr().err
    assert train(corpus, tmp_path / "bpe", "--suffix", ".jsonl", ".md", "--on-bad-line", "skip") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith("files: 2, documents: 81, ")
    assert out.splitlines()[0].endswith(", passed over: 2")
    assert f"passed over: {corpus}/a.jsonl:81 is not JSON" in err
    assert f"passed over: {corpus}/c.md is UTF-16" in err


@pytest.mark.parametrize(("kind", "number"), [("bpe", signal.SIGINT), ("sentencepiece", signal.SIGTERM)])
def test_a_signal_ends_it_at_once_whatever_the_library_does(tmp_path: Path, kind: str, number: signal.Signals) -> None:
    """Native code runs for many seconds without heeding signals."""
    draw = random.Random(0)
    text = " ".join(f"{draw.getrandbits(80):x}" for _ in range(400_000))
    (tmp_path / "c.jsonl").write_text(
        "".join(json.dumps({"text": text[i : i + 999]}) + "\n" for i in range(0, len(text), 999))
    )
    flags = ["--input", tmp_path / "c.jsonl", "--vocab-size", "60000", "--output", tmp_path / "o", "--type", kind]
    unigram = ["--sentencepiece-model-type", "unigram"] if kind == "sentencepiece" else []
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "train_tokenizer.py"), *map(str, flags), *unigram],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    time.sleep(2.5)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    started = time.monotonic()
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - started < 2
    assert (process.returncode, err) == (
        128 + number,
        f"train_tokenizer: stopped by {number.name}; nothing was written under {tmp_path / 'o'}\n",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]
    assert children
    wait_until_gone(int(child) for child in children if "spawn_main" in command_of(child))


def command_of(process: str) -> str:
    path = Path(f"/proc/{process}/cmdline")
    return path.read_text() if path.exists() else ""


def test_a_tokenizer_that_is_there_stays(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(corpus, tmp_path / "bpe") == 0
    before = {p: p.read_bytes() for p in (tmp_path / "bpe").iterdir()}
    assert train(corpus, tmp_path / "bpe", "--vocab-size", "280") == 2
    assert "bpe already exists and holds a tokenizer\n  fix: another --output" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in (tmp_path / "bpe").iterdir()} == before
