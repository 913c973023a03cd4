"""Small tokenizers of every kind, made for tests, as the files that people have."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import models, trainers

from megatron.data.tokenizers.base import EncodedBatch, Tokenizer
from megatron.data.tokenizers.huggingface import END_OF_DOCUMENT, byte_level_bpe, bytes_to_unicode, make_tokenizer_files
from megatron.data.tokenizers.tokenizer import FILES_SUFFIX, RECORD_SUFFIX, TokenizerOptions, TokenizerRecord

TEXT = [
    "The cat sat on the mat, and the hat sat on the cat; the bat did not.",
    "def area(width, height):\n    return width * height  # in m\u00b2\n",
    "na\u00efve fa\u00e7ade \u00fcber \u6771\u4eac, it's 12,345 < 67 & \u00ab8\u00bb [1] (2) {3}",
    "\n\n  indented\tand tabbed   \r\nHello, hello! HELLO? world-wide www.example.org/a_b",
] * 25
TEXT += [f"{a}{b} {b}{a}ing {a}ed" for a in ("walk", "talk", "mill", "form") for b in ("er", "est", "less", "ness")]


@cache
def bpe(vocab_size: int = 400) -> tokenizers.Tokenizer:
    """A byte-level BPE that cuts words as GPT-2's does."""
    tokenizer = byte_level_bpe(models.BPE(), words=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=bytes_to_unicode(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def write_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    """The folder, with these files in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def record(prefix: Path, written: TokenizerRecord | Tokenizer) -> str:
    """Leave the record, and the files of a tokenizer, beside a dataset that need not be there; return the prefix."""
    found = written if isinstance(written, TokenizerRecord) else TokenizerRecord.of(written)
    Path(f"{prefix}.{RECORD_SUFFIX}").write_bytes(found.to_bytes())
    if isinstance(written, Tokenizer) and written.files:
        write_files(Path(f"{prefix}.{FILES_SUFFIX}"), written.files)
    return str(prefix)


def hugging_face(folder: Path) -> Path:
    """A folder as Hugging Face's."""
    return write_files(folder, make_tokenizer_files(bpe()))


def gpt2(folder: Path) -> tuple[Path, Path]:
    """``vocab.json`` and ``merges.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    model = json.loads(bpe().to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    return folder / "vocab.json", folder / "merges.txt"


@cache
def _sentencepiece(flags: tuple[tuple[str, Any], ...]) -> bytes:
    file = io.BytesIO()
    llama = {
        "vocab_size": 420,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "num_threads": 1,
        "minloglevel": 2,
        "hard_vocab_limit": False,
    }
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in flags}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXT), model_writer=file, **(llama | given))
    return file.getvalue()


def sentencepiece_model(path: Path, **flags: Any) -> Path:
    """Write a ``.model`` file like Llama's, changed by ``flags`` of the library's trainer."""
    content = _sentencepiece(tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in flags.items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@cache
def ranks() -> dict[bytes, int]:
    """Byte sequences in the order in which they were joined: the 256 bytes, then words."""
    byte = {letter: number for number, letter in enumerate(bytes_to_unicode())}
    entries = sorted(bpe(700).get_vocab(with_added_tokens=True).items(), key=lambda entry: entry[1])
    words = [bytes(byte[c] for c in entry) for entry, _ in entries if entry != END_OF_DOCUMENT]
    ordered = [bytes((number,)) for number in range(256)] + [word for word in words if len(word) > 1]
    return {word: number for number, word in enumerate(ordered)}


def tiktoken_file(path: Path, words: Mapping[bytes, int] | None = None) -> Path:
    """A file of ranks: lines, or Megatron-LM's list if it ends in ``.json``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pairs = [(base64.b64encode(token).decode(), rank) for token, rank in (words or ranks()).items()]
    if path.suffix == ".json":
        path.write_text(json.dumps([{"rank": r, "token_bytes": t, "token_str": None} for t, r in pairs]))
    else:
        path.write_text("".join(f"{token} {rank}\n" for token, rank in pairs))
    return path


def options_for(kind: str, folder: Path) -> TokenizerOptions:
    """The options that a type needs, with its files in ``folder``."""
    match kind:
        case "ByteTokenizer":
            return TokenizerOptions(kind)
        case "NullTokenizer":
            return TokenizerOptions(kind, vocab_size=300)
        case "HuggingFaceTokenizer":
            return TokenizerOptions(kind, str(hugging_face(folder)))
        case "GPT2BPETokenizer":
            vocab, merges = gpt2(folder)
            return TokenizerOptions(kind, vocab_file=str(vocab), merge_file=str(merges))
        case "TikTokenizer":
            return TokenizerOptions(kind, str(tiktoken_file(folder / "cl100k_base.tiktoken")))
        case _:
            return TokenizerOptions(kind, str(sentencepiece_model(folder / "some.model")))


def apart(encoded: EncodedBatch) -> list[list[int]]:
    """The ids of each text."""
    ids, ends = encoded.ids.tolist(), encoded.lengths.cumsum().tolist()
    return [ids[begin:end] for begin, end in zip([0, *ends], ends)]
