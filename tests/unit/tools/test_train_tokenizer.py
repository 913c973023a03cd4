"""Training of tokenizers: the tool as a user runs it, BPE against the algorithm written out, and the sampled lines."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.preprocess.corpus import TextDocument
from megatron.data.tokenizers.huggingface import (
    END_OF_DOCUMENT,
    NO_EXPORT_NOTE,
    SENTENCEPIECE_MODEL,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    HuggingFaceTokenizer,
    byte_tokenizer,
    bytes_to_unicode,
    make_tokenizer_files,
)
from tests.kit.processes import wait_until_gone
from tests.unit.data.made_tokenizers import TEXT
from tools import preprocess_data
from tools.lib import tokenizer_training
from tools.lib.tokenizer_training import (
    MIN_BPE_SIZE,
    MIN_SENTENCEPIECE_SIZE,
    sample_lines,
    save_tokenizer,
    train_bpe,
    train_sentencepiece,
)
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


# --- the tool ---


def test_a_trained_bpe_is_read_by_everyone(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    text = "for row in rows: na\u00efve = width * \u6771\u4eac"
    assert theirs(text).input_ids == ours.encode(text).tolist()
    assert theirs.decode(theirs(text).input_ids) == text

    flags = ["--input", str(corpus), "--output-prefix", str(tmp_path / "out"), "--append-eod", *printed.split()]
    assert preprocess_data.main(flags) == 0
    data = IndexedDataset(tmp_path / "out_text_document")
    texts = [ours.decode(data[i].tolist()) for i in range(len(data))]
    assert texts == [line + END_OF_DOCUMENT for line in LINES if line]


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_trained_sentencepiece_model_is_used(
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
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm" / SENTENCEPIECE_MODEL))
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


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--vocab-size", "100"], 2, "a vocabulary of 100 is too small for the 256 bytes"),
        (
            ["--type", "sentencepiece", "--vocab-size", "258"],
            2,
            "a vocabulary of 258 is too small for the 256 bytes, <u",
        ),
        (["--sentencepiece-model-type", "bpe"], 2, "--sentencepiece-model-type applies only to SentencePiece"),
        (["--input-sentence-size", "9"], 2, "applies only to SentencePiece\n  fix: --type sentencepiece"),
        (["--type", "sentencepiece", "--input-sentence-size", "0"], 2, "--input-sentence-size 0 must be at least 1"),
        (["--input", "nothing"], 1, "--input nothing: there is no such file"),
        (["--suffix", ".md"], 1, "c.md is UTF-16, not UTF-8 text"),
    ],
)
def test_errors_leave_no_files(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], status: int, message: str
) -> None:
    assert train(corpus, tmp_path / "out", *flags) == status
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["corpus"]


def test_bad_lines_and_too_little_text(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (corpus / "a.jsonl").open("a") as file:
        file.write('{"text": \n{"text": "last"}\n')
    assert train(corpus, tmp_path / "bpe", "--suffix", ".jsonl") == 1
    assert "a.jsonl:81 is not JSON" in capsys.readouterr().err
    flags = ["--suffix", ".jsonl", ".md", "--on-bad-line", "skip", "--vocab-size", "9000"]
    assert train(corpus, tmp_path / "bpe", *flags) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith("files: 2, documents: 81, ")
    assert out.splitlines()[0].endswith(", passed over: 2")
    assert f"passed over: {corpus}/a.jsonl:81 is not JSON" in err
    assert f"passed over: {corpus}/c.md is UTF-16" in err
    entries = HuggingFaceTokenizer(tmp_path / "bpe").vocab_size
    assert f"entries: {entries} (not 9,000: the text has no more pairs that occur twice)" in out

    before = {p: p.read_bytes() for p in (tmp_path / "bpe").iterdir()}
    assert train(corpus, tmp_path / "bpe") == 2
    assert "bpe already exists and holds a tokenizer\n  fix: another --output" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in (tmp_path / "bpe").iterdir()} == before


def test_a_signal_ends_the_tool_at_once(tmp_path: Path) -> None:
    """Native code of SentencePiece runs for many seconds without reacting to signals."""
    draw = random.Random(0)
    text = " ".join(f"{draw.getrandbits(80):x}" for _ in range(400_000))
    documents = (json.dumps({"text": text[i : i + 999]}) + "\n" for i in range(0, len(text), 999))
    (tmp_path / "c.jsonl").write_text("".join(documents))
    flags = ["--input", tmp_path / "c.jsonl", "--vocab-size", "60000", "--output", tmp_path / "o"]
    flags += ["--type", "sentencepiece", "--sentencepiece-model-type", "unigram"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "train_tokenizer.py"), *map(str, flags)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    time.sleep(2.5)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    started = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - started < 2
    stopped = f"train_tokenizer: stopped by SIGINT before {tmp_path / 'o'} was written\n"
    assert (process.returncode, err) == (128 + signal.SIGINT, stopped)
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]
    assert children
    wait_until_gone(int(child) for child in children if "spawn_main" in command_of(child))


def command_of(process: str) -> str:
    path = Path(f"/proc/{process}/cmdline")
    return path.read_text() if path.exists() else ""


# --- byte-level BPE ---

WORDS = ["the", "cat", "sat", "on", "a", "mat", "there", "then", "hat", "na\u00efve", "x = x + 1", "\n\t"]


def documents(texts: list[str]) -> list[TextDocument]:
    return [TextDocument((text,), (Path("d"), i), len(text)) for i, text in enumerate(texts)]


def some_texts(seed: int, count: int) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=12)) for _ in range(count)]


def merges_by_hand(texts: list[str], merges: int) -> list[tuple[str, str]]:
    """Sennrich et al., arXiv 1508.07909, algorithm 1; of equally frequent pairs the one with the smallest ids."""
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = Counter(tuple(word) for text in texts for word, _ in cut.pre_tokenize_str(text))
    ids = {letter: i for i, letter in enumerate(sorted(bytes_to_unicode()))}
    found = []
    for _ in range(merges):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], ids[pair[0]], ids[pair[1]]), default=None)
        if best is None or pairs[best] < 2:
            break
        ids.setdefault("".join(best), len(ids))
        found.append(best)
        new: Counter[tuple[str, ...]] = Counter()
        for word, count in words.items():
            new[merged(word, best)] += count
        words = new
    return found


def merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for letter in word:
        if out and (out[-1], letter) == pair:
            out[-1] += letter
        else:
            out.append(letter)
    return tuple(out)


@pytest.mark.parametrize("seed", range(3))
def test_merges_match_the_algorithm(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = some_texts(seed, 30)
    trained = train_bpe(documents(texts), MIN_BPE_SIZE + 40)
    made = tokenizers.Tokenizer.from_buffer(trained.files[TOKENIZER_JSON])
    merges = [tuple(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
    assert merges == merges_by_hand(texts, 40)
    assert made.get_vocab_size() == MIN_BPE_SIZE + len(merges)
    total = sum(len(t.encode()) for t in texts)
    assert (trained.documents, trained.text_bytes, trained.sample_bytes) == (30, total, total)
    assert trained.sample_tokens == sum(len(made.encode(t).ids) for t in texts)

    monkeypatch.setattr(tokenizer_training, "SAMPLE_BYTES", len(texts[0].encode()))
    other = train_bpe(documents([texts[0], *texts[:0:-1]]), MIN_BPE_SIZE + 40)
    assert other.files == trained.files, "the order of the texts does not matter"
    assert (other.text_bytes, other.sample_bytes) == (total, len(texts[0].encode()))
    assert other.sample_tokens == len(made.encode(texts[0]).ids)


def test_limits_of_bpe() -> None:
    with pytest.raises(DataError, match=r"the documents of the input are all empty \(1\)"):
        train_bpe([TextDocument(("",), (Path("d.txt"), 0), 9)], 300)
    smallest = tokenizers.Tokenizer.from_buffer(train_bpe(documents(["text text"]), MIN_BPE_SIZE).files[TOKENIZER_JSON])
    assert sorted(smallest.get_vocab()) == sorted([*bytes_to_unicode(), END_OF_DOCUMENT])


# --- SentencePiece ---


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_properties_of_a_sentencepiece_model(model_type: str) -> None:
    trained = train_sentencepiece(documents(TEXT), 360, model_type, 10**6)
    made = ModelProto.FromString(trained.files[SENTENCEPIECE_MODEL])
    trainer, pieces = made.trainer_spec, made.pieces
    assert trainer.ModelType.Name(trainer.model_type).lower() == model_type
    assert trainer.byte_fallback
    assert (made.normalizer_spec.precompiled_charsmap, made.normalizer_spec.remove_extra_whitespaces) == (b"", False)
    assert trained.entries == len(pieces) <= 360
    assert sum(piece.type == piece.BYTE for piece in pieces) == 256
    assert [piece.piece for piece in pieces[:3]] == ["<unk>", "<s>", "</s>"]
    words = [piece.piece for piece in pieces if piece.type == piece.NORMAL and len(piece.piece) > 1]
    assert not any(letter.isdigit() for word in words for letter in word)
    exported = [TOKENIZER_JSON, TOKENIZER_CONFIG] if model_type == "bpe" else []
    assert set(trained.files) == {SENTENCEPIECE_MODEL, *exported}
    assert (trained.documents, trained.text_bytes) == (len(TEXT), sum(len(text.encode()) for text in TEXT))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained.files[SENTENCEPIECE_MODEL])
    assert trained.sample_tokens == sum(len(ids) for ids in theirs.encode(TEXT))
    lines = sum(line != "" for text in TEXT for line in text.split("\n"))
    assert trained.notes[0] == f"lines: {lines}, trained on all of them"
    assert train_sentencepiece(documents(TEXT), 360, model_type, 10**6).files == trained.files


def test_a_sample_of_lines_is_uniform_and_in_order() -> None:
    lines = [str(number) for number in range(3000)]
    kept, seen = sample_lines(["\n".join(lines)], 600)
    numbers = [int(line) for line in kept]
    assert seen == 3000
    assert numbers == sorted(set(numbers))
    thirds = Counter(number // 1000 for number in numbers)
    assert all(150 < thirds[third] < 250 for third in range(3))  # 200 expected, give or take four times 10.3
    assert sample_lines(iter(lines), 3000) == (lines, 3000)
    line = "word " * (3 * tokenizer_training.MAX_SENTENCE_CHARS // 5 + 1)
    pieces, _ = sample_lines([line], 100)
    assert "".join(pieces) == line
    assert max(map(len, pieces)) == tokenizer_training.MAX_SENTENCE_CHARS


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["".join(map(chr, range(0x4E00, 0x4F00)))], r"of the text\n  fix: --vocab-size 5\d\d or more"),
        (["", ""], r"all empty \(2\)"),
    ],
)
def test_texts_that_sentencepiece_cannot_use(texts: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        train_sentencepiece(documents(texts), 300, "bpe", 10)


def test_training_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match=r"sentencepiece is needed for .*\n  fix: pip install sentencepiece"):
        train_sentencepiece(documents(["text"]), 300, "bpe", 10)


# --- saving ---

FILES = make_tokenizer_files(byte_tokenizer())


def test_saving_replaces_an_empty_folder_only(tmp_path: Path) -> None:
    save_tokenizer(FILES, tmp_path / "new" / "bpe")
    assert HuggingFaceTokenizer(tmp_path / "new" / "bpe").eod == 256
    with pytest.raises(DataError, match="already exists and is not an empty"):
        save_tokenizer(FILES, tmp_path)
    (tmp_path / "empty").mkdir()
    save_tokenizer(FILES, tmp_path / "empty")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "new"]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failing_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    calls = iter(range(10))

    def full(number: int) -> None:
        if next(calls) == failing:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_tokenizer(FILES, tmp_path / "bpe")
    assert list(tmp_path.iterdir()) == []


def test_frequent_words_become_pieces() -> None:
    trained = train_sentencepiece(documents(["ab ab ab ab cd cd"] * 5), MIN_SENTENCEPIECE_SIZE + 20, "bpe", 10)
    pieces = [piece.piece for piece in ModelProto.FromString(trained.files[SENTENCEPIECE_MODEL]).pieces]
    assert pieces.index("\u2581ab") < pieces.index("\u2581cd")
