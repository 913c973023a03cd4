"""A tokenizer made from files of text: what is read, passed over and told on the way."""

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
from megatron.data.tokenizers.train_sentencepiece import Sentences, train_sentencepiece

TOLD = 20  # bad documents that are told one by one
TELL_SECONDS = 0.2


@dataclass(frozen=True)
class Training:
    """What is to be made, and from what.

    Attributes:
        files: to read, in this order.
        keys: where an object's texts are.
        vocab_size: entries.
        model_type: of SentencePiece; None for a byte-level BPE.
        most_sentences: lines that SentencePiece learns from.
        skip_bad: pass over documents that are not what they should be.
    """

    files: tuple[Path, ...]
    keys: tuple[str, ...]
    vocab_size: int
    model_type: str | None
    most_sentences: int
    skip_bad: bool = False


@dataclass(frozen=True)
class Trained:
    """What came of it.

    Attributes:
        learnt: the tokenizer and its text.
        bad: documents that were passed over.
        notes: what else there is to say.
    """

    learnt: Learnt
    bad: int
    notes: tuple[str, ...]


def train(plan: Training, teller: Teller) -> Trained:
    """The tokenizer of a plan.

    Raises:
        DataError: when the documents do not give it, or one is bad and bad ones are not passed over.
        OSError: when a file cannot be read.
    """
    reading = _Reading(plan, teller)
    if plan.model_type is None:
        return Trained(train_bpe(reading, plan.vocab_size), reading.bad, ())
    learnt, sentences = train_sentencepiece(reading, plan.vocab_size, plan.model_type, plan.most_sentences)
    notes = (_sample(sentences), *(() if TOKENIZER in learnt.files else (NO_FILES,)))
    return Trained(learnt, reading.bad, notes)


def _sample(sentences: Sentences) -> str:
    kept = len(sentences.kept)
    how = "all of them" if kept == sentences.seen else f"a sample of {kept:,}; --input-sentence-size for more or fewer"
    return f"lines: {sentences.seen:,}, learnt from {how}"


class _Reading:
    """The documents of a plan, told while they are read.

    Attributes:
        bad: how many were passed over.
    """

    def __init__(self, plan: Training, teller: Teller) -> None:
        self._plan = plan
        self._teller = teller
        self.bad = 0

    def __iter__(self) -> Iterator[Document]:
        documents = num_bytes = 0
        said = 0.0
        passed_over = self._pass_over if self._plan.skip_bad else None
        for file in self._plan.files:
            for document in read_documents(file, self._plan.keys, passed_over):
                documents, num_bytes = documents + 1, num_bytes + document.num_bytes
                if time.monotonic() - said >= TELL_SECONDS:
                    said = time.monotonic()
                    self._teller.doing(f"reading: {counted(documents, 'documents')}, {format_bytes(num_bytes)}")
                yield document
        what = f"{counted(documents, 'documents')}, {format_bytes(num_bytes)}"
        self._teller.doing(f"learning {self._plan.vocab_size:,} entries from {what}")

    def _pass_over(self, error: DataError) -> None:
        self.bad += 1
        if self.bad <= TOLD:
            self._teller.say(f"passed over: {error.seen}")
        if self.bad == TOLD:
            self._teller.say("passed over: others are counted, not told")
