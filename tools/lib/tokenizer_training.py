"""Train a tokenizer on text files: byte-level BPE like GPT-2's, or SentencePiece like Llama's.

`train_tokenizer` reads the documents, trains, and measures the compression on the first texts. The result depends only
on the texts. `save_tokenizer` writes its files into a new folder, atomically.
"""

from __future__ import annotations

import io
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tokenizers import models, trainers

from megatron.checkpoint.durable_files import durable_rename, sync_folder, write_file
from megatron.config.text import counted, format_bytes
from megatron.data.errors import DataError
from megatron.data.preprocess.corpus import BadDocumentReport, TextDocument, read_documents
from megatron.data.preprocess.files import MAX_LINE_BYTES
from megatron.data.preprocess.remote import InputFile
from megatron.data.preprocess.workers import Report
from megatron.data.tokenizers.huggingface import (
    END_OF_DOCUMENT,
    NO_EXPORT_NOTE,
    SENTENCEPIECE_MODEL,
    TOKENIZER_JSON,
    byte_level_bpe,
    bytes_to_unicode,
    make_tokenizer_files,
)
from megatron.data.tokenizers.sentencepiece import SentencePieceTokenizer

SAMPLE_BYTES = 2_000_000
MIN_BPE_SIZE = 257  # the bytes and the end-of-document token
MIN_SENTENCEPIECE_SIZE = 259  # the bytes, <unk>, <s> and </s>
MODEL_TYPES = ("bpe", "unigram")
MAX_SENTENCE_CHARS = 10_000  # characters of a sentence; longer lines, which SentencePiece would skip, are split
NUM_THREADS = 16  # of SentencePiece; constant, because the result depends on it
PROGRESS_SECONDS = 0.2


@dataclass(frozen=True)
class TokenizerTrainingOptions:
    """Settings of the training of a tokenizer."""

    files: tuple[InputFile, ...]  # read in this order
    keys: tuple[str, ...]  # JSON keys of the texts
    vocab_size: int
    model_type: str | None  # of SentencePiece; None for a byte-level BPE
    max_sentences: int  # number of lines SentencePiece is trained on
    skip_bad: bool = False  # skip invalid documents instead of failing
    max_line_bytes: int = MAX_LINE_BYTES  # of a line or a plain file; a longer one is an invalid document


@dataclass(frozen=True)
class TrainedTokenizer:
    """Trained tokenizer and statistics of its text."""

    files: Mapping[str, bytes]  # of the tokenizer, by name
    entries: int  # vocabulary size
    documents: int
    text_bytes: int  # UTF-8 bytes of all texts
    sample_bytes: int  # UTF-8 bytes of the first texts, up to `SAMPLE_BYTES`, encoded to measure the compression
    sample_tokens: int  # ids of the sample
    bad: int = 0  # number of documents skipped
    notes: tuple[str, ...] = ()  # lines to print


class TrainingTexts:
    """Iterator over the texts of documents that collects statistics."""

    def __init__(self, documents: Iterable[TextDocument]) -> None:
        self._documents = documents
        self._count = self._text_bytes = self._sample_bytes = 0
        self.sample: list[str] = []  # the first texts, up to `SAMPLE_BYTES`

    def __iter__(self) -> Iterator[str]:
        """Yield the texts; raise DataError at the end, if all were empty."""
        for document in self._documents:
            self._count += 1
            for text in document.texts:
                if isinstance(text, bytes):
                    text = text.decode()
                size = len(text.encode())
                self._text_bytes += size
                if self._sample_bytes + size <= SAMPLE_BYTES or not self.sample:
                    self.sample.append(text)
                    self._sample_bytes += size
                yield text
        if not self._text_bytes:
            raise DataError(f"the documents of the input are all empty ({self._count:,})", "another --input")

    def trained(self, files: Mapping[str, bytes], entries: int, sample_tokens: int) -> TrainedTokenizer:
        """Return a tokenizer trained on these texts, with their statistics."""
        return TrainedTokenizer(files, entries, self._count, self._text_bytes, self._sample_bytes, sample_tokens)


def check_trained_size(vocab_size: int, is_bpe: bool) -> None:
    """Raise DataError if the vocabulary is too small for the 256 bytes and the special tokens."""
    smallest = MIN_BPE_SIZE if is_bpe else MIN_SENTENCEPIECE_SIZE
    if vocab_size < smallest:
        entries = f"the 256 bytes and {END_OF_DOCUMENT}" if is_bpe else "the 256 bytes, <unk>, <s> and </s>"
        raise DataError(f"a vocabulary of {vocab_size} is too small for {entries}", f"--vocab-size {smallest} or more")


def check_output_folder(folder: Path) -> None:
    """Raise DataError if a folder exists and is not empty."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        content = "holds a tokenizer" if (folder / TOKENIZER_JSON).exists() else "is not an empty folder"
        raise DataError(f"{folder} already exists and {content}", "another --output", f"remove {folder}")


def save_tokenizer(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files of a tokenizer into a new folder, atomically; raise DataError if it exists and is not empty."""
    check_output_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    temporary.mkdir()
    try:
        for name, content in files.items():
            write_file(temporary / name, content)
        sync_folder(temporary)
        durable_rename(temporary, folder)  # replaces an empty folder
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def train_tokenizer(plan: TokenizerTrainingOptions, report: Report) -> TrainedTokenizer:
    """Train a tokenizer."""
    bad = BadDocumentReport(plan.skip_bad, partial(report, "message"))
    documents = _read_corpus(plan, report, bad)
    if plan.model_type is None:
        trained = train_bpe(documents, plan.vocab_size)
    else:
        trained = train_sentencepiece(documents, plan.vocab_size, plan.model_type, plan.max_sentences)
    return replace(trained, bad=bad.count)


def _read_corpus(plan: TokenizerTrainingOptions, report: Report, bad: BadDocumentReport) -> Iterator[TextDocument]:
    """Yield the documents of a plan and report progress."""
    documents = num_bytes = 0
    last_report = 0.0
    for document in read_documents(plan.files, plan.keys, bad, plan.max_line_bytes):
        documents += 1
        num_bytes += document.num_bytes
        if time.monotonic() - last_report >= PROGRESS_SECONDS:
            last_report = time.monotonic()
            report("stage", f"reading: {counted(documents, 'document')}, {format_bytes(num_bytes)}")
        yield document
    corpus = f"{counted(documents, 'document')}, {format_bytes(num_bytes)}"
    report("stage", f"training {plan.vocab_size:,} entries on {corpus}")


def train_bpe(documents: Iterable[TextDocument], vocab_size: int) -> TrainedTokenizer:
    """Train a tokenizer of at most ``vocab_size`` entries: the 256 bytes, `END_OF_DOCUMENT` and frequent merges.

    The result depends on the texts but not on their order. It is smaller if the text has no more pairs to merge.
    """
    tokenizer = byte_level_bpe(models.BPE(), words=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=bytes_to_unicode(),
        show_progress=False,
    )
    texts = TrainingTexts(documents)
    tokenizer.train_from_iterator(iter(texts), trainer)
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts.sample))
    return texts.trained(make_tokenizer_files(tokenizer), tokenizer.get_vocab_size(), tokens)


def train_sentencepiece(
    documents: Iterable[TextDocument], vocab_size: int, model_type: str, max_sentences: int
) -> TrainedTokenizer:
    """Train a tokenizer of at most ``vocab_size`` pieces, including the 256 bytes, so that every text can be encoded.

    Text is not normalized and no space is removed. Digits are separate pieces; runs of spaces may be pieces. Equal
    texts give equal files.

    Args:
        documents: read once.
        vocab_size: number of pieces.
        model_type: ``bpe`` or ``unigram``.
        max_sentences: number of lines to train on, kept in memory.
    """
    texts = TrainingTexts(documents)
    sentences, seen = sample_lines(texts, max_sentences)
    content = _run_sentencepiece(sentences, vocab_size, model_type)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, SENTENCEPIECE_MODEL).write_bytes(content)
        tokenizer = SentencePieceTokenizer(folder)
    exported = tokenizer.hugging_face_files()
    tokens = tokenizer.encode_batch(texts.sample).ids.size
    sample = "all of them" if len(sentences) == seen else f"a sample of {len(sentences):,} (--input-sentence-size)"
    notes = (f"lines: {seen:,}, trained on {sample}", *(() if exported else (NO_EXPORT_NOTE,)))
    return replace(texts.trained({SENTENCEPIECE_MODEL: content, **exported}, tokenizer.vocab_size, tokens), notes=notes)


def sample_lines(texts: Iterable[str], most: int) -> tuple[list[str], int]:
    """Return a uniform random sample of at most ``most`` lines, in the order of the texts, and the number of all lines.

    Source: algorithm R of Vitter, "Random sampling with a reservoir", 1985.
    """
    generator = random.Random(0)
    reservoir: list[tuple[int, str]] = []
    seen = 0
    for line in _sentences(texts):
        if seen < most:
            reservoir.append((seen, line))
        elif (place := generator.randrange(seen + 1)) < most:
            reservoir[place] = (seen, line)
        seen += 1
    return [line for _, line in sorted(reservoir)], seen


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), MAX_SENTENCE_CHARS):
                yield line[start : start + MAX_SENTENCE_CHARS]


def _run_sentencepiece(sentences: list[str], vocab_size: int, model_type: str) -> bytes:
    try:
        import sentencepiece
    except ImportError as error:
        raise DataError("sentencepiece is needed for --type sentencepiece", "pip install sentencepiece") from error
    file = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=file,
            model_type=model_type,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=8 * MAX_SENTENCE_CHARS,
            num_threads=NUM_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        needed = re.search(r"smaller than required_chars. \d+ vs (\d+)", str(error))
        if needed is None:
            raise DataError(f"SentencePiece cannot train on this text: {error}", "another --input") from error
        seen = f"a vocabulary of {vocab_size} is too small for the bytes and the frequent characters of the text"
        raise DataError(seen, f"--vocab-size {needed[1]} or more") from error
    return file.getvalue()
