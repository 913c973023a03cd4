"""Train a tokenizer from text files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.config.numbers import format_bytes
from megatron.data.command_line import counted
from megatron.data.errors import DataError
from megatron.data.text.child import Teller
from megatron.data.text.corpus import Document, read_documents
from megatron.data.tokenizers.huggingface import NO_FILES, TOKENIZER
from megatron.data.tokenizers.learnt import Learnt
from megatron.data.tokenizers.train_bpe import train_bpe
from megatron.data.tokenizers.train_sentencepiece import train_sentencepiece

TOLD = 20  # bad documents reported one by one; the others are only counted
TELL_SECONDS = 0.2


@dataclass(frozen=True)
class Training:
    """Settings of the training of a tokenizer."""

    files: tuple[Path, ...]  # read in this order
    keys: tuple[str, ...]  # JSON keys of the texts
    vocab_size: int
    model_type: str | None  # of SentencePiece; None for a byte-level BPE
    max_sentences: int  # number of lines SentencePiece is trained on
    skip_bad: bool = False  # skip invalid documents instead of failing


@dataclass(frozen=True)
class Trained:
    """Result of the training of a tokenizer."""

    tokenizer: Learnt
    bad: int  # number of documents skipped
    notes: tuple[str, ...]  # lines to print


def train(plan: Training, teller: Teller) -> Trained:
    """Train a tokenizer.

    Raises:
        DataError: if the documents do not suffice, or one is invalid and ``skip_bad`` is off.
        OSError: if a file cannot be read.
    """
    documents = _CorpusReader(plan, teller)
    if plan.model_type is None:
        return Trained(train_bpe(documents, plan.vocab_size), documents.bad, ())
    tokenizer, sentences = train_sentencepiece(documents, plan.vocab_size, plan.model_type, plan.max_sentences)
    kept = len(sentences.kept)
    sample = "all of them" if kept == sentences.seen else f"a sample of {kept:,} (--input-sentence-size)"
    notes = [f"lines: {sentences.seen:,}, trained on {sample}"]
    if TOKENIZER not in tokenizer.files:
        notes.append(NO_FILES)
    return Trained(tokenizer, documents.bad, tuple(notes))


class _CorpusReader:
    """Iterator over the documents of a plan that reports progress."""

    def __init__(self, plan: Training, teller: Teller) -> None:
        self._plan = plan
        self._teller = teller
        self.bad = 0  # documents skipped

    def __iter__(self) -> Iterator[Document]:
        documents = num_bytes = 0
        last_report = 0.0
        on_bad = self._skip if self._plan.skip_bad else None
        for file in self._plan.files:
            for document in read_documents(file, self._plan.keys, on_bad):
                documents, num_bytes = documents + 1, num_bytes + document.num_bytes
                if time.monotonic() - last_report >= TELL_SECONDS:
                    last_report = time.monotonic()
                    self._teller.set_stage(f"reading: {counted(documents, 'documents')}, {format_bytes(num_bytes)}")
                yield document
        corpus = f"{counted(documents, 'documents')}, {format_bytes(num_bytes)}"
        self._teller.set_stage(f"training {self._plan.vocab_size:,} entries on {corpus}")

    def _skip(self, error: DataError) -> None:
        self.bad += 1
        if self.bad <= TOLD:
            self._teller.message(f"passed over: {error.seen}")
        if self.bad == TOLD:
            self._teller.message("passed over: further ones are only counted")
